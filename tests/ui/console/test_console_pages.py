"""Every page run by Streamlit without a browser, against a fake fleet: what it shows, asks and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest
from test_console_server import running
from ui_fakes import Fake, a_plan, eventually

from ui.console.backend import Backend, a_change, install
from ui.console.frame import Frame
from ui.console.planning import Planning, busy, flags_of, stop_all
from ui.console.screens import PAGES
from ui.console.screens.planner import compare_table
from ui.words import words

TIMEOUT_S = 20


@pytest.fixture
def backend(fleet: Fake) -> Iterator[Backend]:
    with running(Backend(fleet.url)) as backend:
        install(backend)
        assert eventually(lambda: backend.state is not None)
        yield backend
        install(None)


def script(name: str, lang: str) -> None:
    """What Streamlit runs: one page, as ui/console/app.py would."""
    from ui.console.backend import serving
    from ui.console.frame import Frame
    from ui.console.screens import PAGES
    from ui.words import words

    PAGES[name](Frame(serving(), words(lang), serving().stale))


def page(name: str, lang: str = "en") -> AppTest:
    run = AppTest.from_function(script, default_timeout=TIMEOUT_S, kwargs={"name": name, "lang": lang}).run()
    assert [one.message for one in run.exception] == []
    return run


def button(run: AppTest, key: str) -> Any:
    return next(one for one in run.button if one.key == key)


@pytest.mark.parametrize(("name", "lang"), [(name, ("en", "zh-Hant")[index % 2]) for index, name in enumerate(PAGES)])
def test_every_page_is_drawn(backend: Backend, name: str, lang: str):
    run = page(name, lang)
    assert run.title[0].value == words(lang).say(f"console.nav.{name}")
    assert [one.value for one in run.error] == []


def test_the_whole_script_draws_strip_menu_and_first_page(backend: Backend):
    run = AppTest.from_file("../../../ui/console/app.py", default_timeout=TIMEOUT_S).run()
    assert [one.message for one in run.exception] == []
    assert run.title[0].value == "Overview"
    run.selectbox(key="lang").set_value("zh-Hant").run()
    assert run.title[0].value == "\u7e3d\u89bd"


def test_the_past_of_the_chosen_instance_is_asked_for(backend: Backend, fleet: Fake):
    run = page("instances")
    assert run.subheader[-1].value == "The last 10 minutes of cpu-0"
    run.selectbox(key="instance").set_value("cpu-1").run()
    assert run.subheader[-1].value == "The last 10 minutes of cpu-1"
    asked = [path for path, _ in fleet.asked if path.startswith("GET /v1/series")]
    assert "names=instance.cpu-0.tpot_p50_s,instance.cpu-0.num_running" in asked[0]
    assert "names=instance.cpu-1.tpot_p50_s,instance.cpu-1.num_running" in asked[-1]


def test_a_dry_run_is_applied_once_with_the_version_it_saw(backend: Backend, fleet: Fake):
    run = page("rebalance")
    assert button(run, "predict").disabled  # nothing to move yet
    stepper = next(one for one in run.number_input if "prefill" in one.label)
    stepper.set_value(0).run()
    button(run, "predict").click().run()
    assert fleet.asked[-1][0] != "POST /v1/plans/plan-1/apply"
    asked = [body for path, body in fleet.asked if path == "POST /v1/plans"]
    assert asked[-1] == {"xpyd": None, "moves": {"cpu-0": "decode"}}
    fleet.plans = [a_plan("applying"), a_plan("done")]
    button(run, "apply").click().run()
    applied = [body for path, body in fleet.asked if path.endswith("/apply")]
    assert [body["base_version"] for body in applied] == [4]
    assert len(applied[0]["idempotency_key"]) == 32
    assert [one.message for one in run.exception] == []


def test_a_fleet_that_changed_since_disables_apply(backend: Backend, fleet: Fake):
    fleet.plans = [a_plan(base_version=3)]
    run = page("rebalance")
    next(one for one in run.number_input if "prefill" in one.label).set_value(0).run()
    button(run, "predict").click().run()
    assert button(run, "apply").disabled
    assert "version 3, now 4" in run.warning[0].value


def test_a_refusal_is_shown_in_the_servers_words(backend: Backend, fleet: Fake):
    fleet.apply_status = 409
    run = page("instances")
    button(run, "do").click().run()
    assert "last ready decode instance" in run.error[0].value


def test_a_drain_is_confirmed_by_typing_the_id(backend: Backend, fleet: Fake):
    run = page("instances")
    run.selectbox(key="action cpu-0 ready").set_value("drain").run()
    assert button(run, "do").disabled
    confirm = run.text_input(key="confirm drain cpu-0")
    confirm.set_value("cpu-1").run()
    assert button(run, "do").disabled
    confirm.set_value("cpu-0").run()
    button(run, "do").click().run()
    sent = [body for path, body in fleet.asked if path == "POST /v1/instances/cpu-0/drain"]
    assert [body["base_version"] for body in sent] == [4]
    assert "2 requests left" in run.success[0].value


def test_stale_figures_disable_what_changes_the_fleet(backend: Backend, fleet: Fake, monkeypatch: pytest.MonkeyPatch):
    run = page("instances")
    monkeypatch.setattr("ui.feed.STALE_S", -1.0)
    run.run()
    assert button(run, "do").disabled
    assert button(page("rebalance"), "predict").disabled
    drawn_before = Frame(backend, words("en"), stale=False)  # the press of someone whose browser did not know yet
    assert drawn_before.act(lambda client: client.cordon("cpu-0", a_change(4))) is None
    assert [path for path, _ in fleet.asked if "cordon" in path] == []


def test_objectives_are_previewed_and_applied_with_the_version_that_was_seen(backend: Backend, fleet: Fake):
    run = page("traffic")
    assert button(run, "apply_objectives").disabled  # nothing has been changed yet
    run.number_input(key="ttft of default").set_value(0.1).run()
    texts = " ".join(one.proto.body for one in run.get("html"))
    assert [text in texts for text in ("TTFT 100.0 ms, TPOT 200.0 ms", ">100.0%<", ">0.0%<", "$4.00")] == [True] * 4
    fleet.fleet = msgspec.structs.replace(fleet.fleet, version=9)  # somebody else was quicker
    button(run, "apply_objectives").click().run()
    sent = [body for path, body in fleet.asked if path == "PUT /v1/classes"]
    assert [(body["base_version"], body["actor"]) for body in sent] == [(4, "console")]
    assert sent[0]["classes"] == {"default": {"ttft_s": 0.1, "tpot_s": 0.2, "e2e_s": None}}
    run.checkbox(key="limited default").uncheck().run()
    assert run.number_input(key="ttft of default").disabled
    button(run, "apply_objectives").click().run()
    sent = [body for path, body in fleet.asked if path == "PUT /v1/classes"]
    assert (sent[1]["base_version"], sent[1]["classes"]) == (10, {"default": None})


def test_the_autopilot_is_told_its_mode(backend: Backend, fleet: Fake):
    run = page("rebalance")
    run.button_group(key="autopilot mode advise").set_value("auto").run()
    sent = [body for path, body in fleet.asked if path == "PUT /v1/autopilot"]
    assert [(body["mode"], body["actor"]) for body in sent] == [("auto", "console")]


def test_the_playground_streams_and_explains_itself(backend: Backend, fleet: Fake):
    run = page("playground")
    run.chat_input[0].set_value("hello").run()
    assert [one.message for one in run.exception] == []
    assert [one.value for one in run.text] == ["hello", "abcdef"]
    assert any("TTFT" in one.value for one in run.caption)


def test_a_planner_that_cannot_says_why(backend: Backend):
    run = page("planner")
    run.text_input(key="plan fleet").set_value("").run()
    button(run, "plan").click().run()

    def failed() -> bool:
        run.run()
        return bool(run.error)

    assert eventually(failed, 20.0)
    assert "--fleet" in run.error[0].value


def test_a_planner_reads_files_alone(backend: Backend):
    run = page("planner")
    run.text_input(key="plan file").set_value("/dev/zero").run()
    button(run, "plan").click().run()
    assert [one.value for one in run.error] == ["The planner could not: /dev/zero: No such file or directory"]
    assert not busy()


@pytest.mark.slow
def test_a_planner_runs_beside_the_pages_and_is_compared():
    flags = {"fleet": "2xH800", "model": "llama-3.1-8b", "trace": "generated:conversation?num=60", "num": 50,
             "slo": "ttft=1,tpot=0.04", "effort": 1, "current": "1xH800:prefill,1xH800:decode",
             "no-baselines": True}  # fmt: skip
    planning = Planning(flags_of(flags))
    planning.start()
    said: set[object] = set()

    def ended() -> bool:
        said.add(planning.progress())
        return not planning.running

    try:
        assert busy()
        assert eventually(ended, 110.0)
    finally:
        planning.stop()
    assert planning.fault() is None
    assert not busy()
    assert said - {None}
    found = planning.outcome()
    assert found.rows[0].low < found.rows[0].max_rate < found.rows[0].high
    assert found.possible_rate is not None
    assert compare_table(found, words("en")).count("<tr>") == len(found.rows) + 1


def test_a_planner_is_ended_with_all_it_started():
    planning = Planning(["--fleet=64xH800", "--model=llama-3.1-70b", "--num=5000", "--effort=9"])
    planning.start()
    assert planning.running
    stop_all()
    assert eventually(lambda: not planning.running, 10.0)
    assert planning.stopped
