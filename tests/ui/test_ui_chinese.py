"""In Traditional Chinese no sentence is left in English, on any page of the console or panel of the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec
import pytest
from streamlit.testing.v1 import AppTest
from test_console_pages import page
from test_console_server import running
from top_fakes import PEN, FixedApp
from ui_fakes import Fake, a_plan, a_record, an_autopilot, eventually

from transfer.api import AuditRow, FleetState, Plan, RequestRecord
from transfer.said import Said, counted, say
from transfer.sentences import ENGLISH
from ui.console.backend import Backend, install
from ui.console.broadcast import Scene
from ui.console.screens import PAGES
from ui.console.trail import Trail
from ui.console.views import draw
from ui.errors import ApiError
from ui.insight import miss_text, reason_text, refusal_text, risk_texts
from ui.tui.draw_plan import plan_lines
from ui.tui.draw_requests import request_detail
from ui.tui.lines import plain
from ui.tui.panels import panels
from ui.tui.pen import Pen
from ui.words import placeholders, words

CHINESE = words("zh-Hant", {})
CJK = re.compile(r"[\u2e80-\u9fff]")
SENTENCE = re.compile(r"[A-Za-z]{2,}(?:[,;:]? [A-Za-z]{2,}){2,}")
"""Three words of ASCII in a row: no id, no figure."""
ADVICE = say("advice.move", moves="n3 P->D", promise=say("advice.promise", gain="+18", low="12", high="23"), seconds=6)
LINE = say("hold.why", why=say("hold.again", num=2, advice=ADVICE))
NOTICE = say("notice.late")
LATE = say("ended.not_taken", seconds="600", why=say("wait.no_decode", model="tiny"))
RULE = say("autopilot.rule", every=1.5, short=10, middle=60, long=300, rest=15)


def sentences(texts: Iterable[str]) -> list[str]:
    """English ones among them: parts between tags, lines and gaps without a Chinese sign."""
    parts = (part for text in texts for part in re.split(r"<[^>]*>|\n|\s{2,}", text))
    return [part for part in parts if not CJK.search(part) and SENTENCE.search(part)]


def a_spoken_plan(status: str = "done") -> Plan:
    failed, risk = say("step.lost", id="cpu-0", state="draining"), counted("risk.running", 1)
    basis = say("basis.arrivals", num=9, seconds=60, prefill="80%", decode="40%", provenance=say("provenance.preset"),
                error="10%")  # fmt: skip
    plan = a_plan(status, risks=(str(risk),), risks_said=(risk,), failed=str(failed), failed_said=failed)
    step = msgspec.structs.replace(plan.steps[0], detail="-", said=say("step.verified", id="cpu-0"))
    predicted = msgspec.structs.replace(plan.predicted, basis=str(basis), said=basis)
    return msgspec.structs.replace(plan, steps=(step,), predicted=predicted)


def a_spoken_record() -> RequestRecord:
    record = a_record()
    reason = (say("place.good", share="3%"), say("place.ttft", seconds="3", objective="2"))
    why = tuple(msgspec.structs.replace(one, reason="said in other words", said=reason) for one in record.why)
    return msgspec.structs.replace(record, why=why, good=False, missed_by_s={"ttft": 1.2}, error=str(LATE),
                                   error_said=LATE)  # fmt: skip


def a_spoken_row() -> AuditRow:
    said = say("autopilot.looks", line=LINE, num=3)
    return AuditRow(at_s=0.0, actor="alice", action="apply", subject="plan-1", detail=str(said), said=said)


@pytest.fixture
def spoken(fleet: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """A fleet that says something of everything."""
    fleet.plans, fleet.record = [a_spoken_plan()], a_spoken_record()
    view = an_autopilot(line=str(LINE), said=LINE, rule=str(RULE), rule_said=RULE)
    looks = tuple(msgspec.structs.replace(one, line=str(LINE), said=LINE) for one in view.evaluations)
    fleet.autopilot = msgspec.structs.replace(view, evaluations=looks)
    fleet.fleet = msgspec.structs.replace(fleet.fleet, advice=str(LINE), advice_said=LINE)
    with running(Backend(fleet.url)) as backend:
        install(backend)
        assert eventually(lambda: backend.state is not None)
        yield fleet
        install(None)


def shown(run: AppTest) -> list[str]:
    kinds = ("text", "caption", "markdown", "title", "subheader", "info", "warning", "error", "success")
    found = [one.value for kind in kinds for one in run.get(kind)]
    found += [one.label for kind in ("button", "expander", "selectbox", "text_input", "toggle", "number_input")
              for one in run.get(kind)]  # fmt: skip
    return [*found, *(one.proto.body for one in run.get("html"))]


@pytest.mark.parametrize("name", PAGES)
def test_no_page_says_an_english_sentence(spoken: Fake, name: str):
    assert sentences(shown(page(name, "zh-Hant"))) == []


def test_nor_do_the_live_parts(fleet: Fake):
    state: FleetState = msgspec.structs.replace(
        fleet.fleet, advice=str(LINE), advice_said=LINE, autopilot="advise", queue_late=7, notice=str(NOTICE),
        notice_said=NOTICE,
    )  # fmt: skip
    drawn = draw(Scene(state, 0.0, fleet.url, Trail(), ()), "zh-Hant")
    assert sentences(drawn.parts.values()) == []
    assert "+18 %" in drawn.parts["advice"]
    assert "prefill" in drawn.parts["advice"]
    assert "\u5df2\u8d85\u904e\u76ee\u6a19" in drawn.parts["figures"]


def test_nor_does_any_panel_of_the_terminal():
    pen = Pen(CHINESE, zone=PEN.zone)
    picture = FixedApp(pen)._taken()
    assert picture.fleet is not None
    view = an_autopilot(line=str(LINE), said=LINE, rule=str(RULE), rule_said=RULE)
    looks = tuple(msgspec.structs.replace(one, line=str(LINE), said=LINE) for one in view.evaluations)
    state = msgspec.structs.replace(
        picture.fleet, advice=str(LINE), advice_said=LINE, notice=str(NOTICE), notice_said=NOTICE, queue_late=7
    )
    picture = replace(
        picture, fleet=state, audit=(msgspec.structs.replace(a_spoken_row(), at_s=picture.at_s),),
        records=(a_spoken_record(),), autopilot=msgspec.structs.replace(view, evaluations=looks),
    )  # fmt: skip
    for panel in panels().values():
        lines = [*panel.draw(pen, picture, 118, 40), *panel.detail(pen, picture, 118)]
        assert sentences(plain(one) for one in lines) == [], panel.name
    assert sentences(plain(one) for one in plan_lines(pen, a_spoken_plan(), 118, None)) == []


def test_what_a_client_was_told_is_said_in_the_operator_s_language(spoken: Fake):
    chinese = CHINESE.sentence(LATE, "")
    assert CJK.search(chinese)
    for pen, words_, other in ((Pen(CHINESE), chinese, str(LATE)), (PEN, str(LATE), chinese)):
        lines = "".join(plain(one) for one in request_detail(pen, a_spoken_record(), 200))
        assert words_ in lines
        assert other not in lines
    texts = "".join(shown(page("requests", "zh-Hant")))
    assert chinese in texts
    assert str(LATE) not in texts


def test_every_sentence_of_the_control_plane_is_said_in_both_languages():
    for code, english in ENGLISH.items():
        said = say(code, **dict.fromkeys(placeholders(english), "7"))
        chinese = CHINESE.sentence(said, "")
        assert chinese, code
        assert not SENTENCE.search(chinese), code
        assert words("en", {}).sentence(said, str(said)) == str(said)


def test_sentences_within_sentences_and_what_is_unknown():
    assert str(LINE) == "hold: if the next 2 looks agree, move n3 P->D: +18 %, 80 % interval 12 to 23, about 6 s"
    assert "\u79fb\u52d5 n3 P->D" in CHINESE.sentence(LINE, "")
    assert CHINESE.sentence(Said("a.code.of.tomorrow"), "as it is") == "as it is"
    assert CHINESE.sentence(None, "as it is") == "as it is"
    assert msgspec.json.decode(msgspec.json.encode(LINE), type=Said) == LINE
    refused = ApiError("the fleet changed", 409, say("refused.busy", plan="plan-1"))
    assert CJK.search(refusal_text(refused, CHINESE))
    assert refusal_text(refused, words("en", {})) == "the fleet changed"
    assert risk_texts(a_plan(), CHINESE) == ["prefill queue grows"], "of a control plane that gives no codes"
    assert reason_text(a_record().why[1], CHINESE) == "its KV is full"
    assert miss_text(a_spoken_record(), words("en", {})) == "Missed by TTFT +1.20 s"
