"""Every panel in every size, language and character set: it fits, it says what the model says, and never breaks."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest
from top_fakes import PEN, START_S, fleet, instances, records, tape
from ui_fakes import a_kv_detail, a_plan

from transfer.api import Prediction
from transfer.said import say
from transfer.screens import CacheView, Column, LinkView, SeriesView
from ui.tui.draw import NUM_HEAD_LINES, PANELS, footer, head
from ui.tui.draw_kv import kv_lines
from ui.tui.draw_plan import plan_lines
from ui.tui.draw_requests import request_detail, waterfall
from ui.tui.lines import Line, ascii_only, cells, plain
from ui.tui.model import Picture
from ui.tui.panels import Panel
from ui.tui.pen import Pen
from ui.tui.session import ReplaySession
from ui.words import words

PENS = {"en": PEN, "zh": Pen(words("zh-Hant", {}), zone=PEN.zone), "ascii": Pen(words("en", {}), True, PEN.zone)}
SEEN = tape()


def picture(**changes: object) -> Picture:
    found = ReplaySession(SEEN, "x").picture(Picture(), None)
    return replace(found, **{"mode": "live", "age_s": 0.4, "read_only": False, **changes})  # type: ignore[arg-type]


def texts(lines: list[Line]) -> str:
    return "\n".join(plain(one) for one in lines)


@pytest.mark.parametrize("size", [(80, 18), (120, 34), (200, 54), (40, 6), (300, 100)], ids=str)
@pytest.mark.parametrize("pen", PENS.values(), ids=PENS)
@pytest.mark.parametrize("name", PANELS)
def test_a_panel_fits(name: str, pen: Pen, size: tuple[int, int]) -> None:
    width, height = size
    lines = Panel(name).draw(pen, picture(), width, height)
    assert 0 < len(lines) <= height
    if width >= 80:
        assert max(cells(one) for one in lines) <= width, name
    if pen.ascii:
        said = texts([ascii_only(one) for one in lines])
        assert said.isascii(), [one for one in said if not one.isascii()]


@pytest.mark.parametrize("pen", PENS.values(), ids=PENS)
def test_the_head_answers_the_first_questions(pen: Pen) -> None:
    found = picture(fleet=fleet())
    lines = head(pen, found, 120)
    assert len(lines) == NUM_HEAD_LINES
    assert all(cells(one) == 120 for one in lines)
    for figure in ("97.0%", "90%", "9.70/s", "2.425/s", "$0.00024", "2P2D", "12", "move n0 P->D: +18 %"):
        assert figure in texts(lines)


def test_the_head_says_what_is_wrong_before_anything_else() -> None:
    views = (msgspec.structs.replace(instances()[0], state="lost"), *instances()[1:])
    said = texts(head(PEN, picture(fleet=fleet(instances=views)), 120))
    assert "Degraded: lost: n0; 97.0% within objectives (target 90%)" in said
    assert "STALE: nothing new for 7 s; actions are disabled" in texts(head(PEN, picture(age_s=7.0), 120))
    assert "no fleet answers" in texts(head(PEN, Picture(url="u", error="no fleet answers at u"), 80))
    assert "connecting to u" in texts(head(PEN, Picture(url="u"), 80))


def test_the_moment_shown_is_marked() -> None:
    for mode, sign in (("live", "live 22:23:19"), ("paused", "PAUSED"), ("past", "PAST"), ("replay", "REPLAY")):
        assert sign in plain(head(PEN, picture(mode=mode), 120)[0]), mode
    assert "STALE" in plain(head(PEN, picture(age_s=4.0), 120)[0])


def test_the_keys_that_fit_are_named() -> None:
    assert plain(footer(PEN, "kv", 80)).startswith("1 Overview 2 Instances 3 Requests [4 KV] 5 Events 6 Autopilot")
    wide = plain(footer(PEN, "overview", 200))
    assert all(name in wide for name in ("? Help", "/ filter", "m move", "space pause", "q quit"))


def test_the_overview_grows_with_the_screen() -> None:
    small = texts(Panel("overview").draw(PEN, picture(), 80, 18))
    large = texts(Panel("overview").draw(PEN, picture(), 200, 54))
    assert "Those that miss lose most time in queue (43%)" in small
    assert "TTFT p99" not in small
    assert "TTFT p99" in large
    assert "predicted by" in large
    assert "▲" in large, "the role that changed is marked on the time axis"


def test_each_role_has_its_line_and_letter() -> None:
    said = texts(Panel("overview").draw(PEN, picture(), 80, 18))
    for row in ("P prefill    2 ●●", "D decode     2 ●●", "K KV pool    1 ●"):
        assert row in said
    many = picture(fleet=fleet(instances=instances(65)))
    said = texts(Panel("overview").draw(PEN, many, 80, 18))
    assert "P prefill   32 ●32" in said


def test_a_request_shows_its_waterfall_and_why() -> None:
    said = texts(request_detail(PEN, records()[0], 100))
    for part in ("✓ good", "20 prompt tokens (16 from KV", "prefill n0, decode n2", "its KV is full", "first token  "):
        assert part in said
    bars = [plain(one) for one in waterfall(PEN, records()[0], 100)]
    starts = [one.index("█") for one in bars if "█" in one]
    assert starts == sorted(starts)
    assert len(starts) == 5
    assert sum(one.count("█") for one in bars) in range(70 - 5, 70 + 6), "together they are as long as TTFT"
    assert "before a first token" in texts(request_detail(PEN, records()[2], 100))


def test_a_plan_shows_now_predicted_and_measured() -> None:
    done = a_plan("done", measured=Prediction(goodput_per_s=2.5, duration_s=0.25))
    said = texts(plan_lines(PEN, done, 90, Prediction(goodput_per_s=1.5)))
    assert "2P1D → 1P2D  done" in said
    assert "1.50/s" in said
    assert "2.00/s (1.00 to 3.00)" in said
    assert "2.50/s" in said
    assert "250.0 ms" in said
    assert "Risk: prefill queue grows" in said
    assert "Nothing to change" in texts(plan_lines(PEN, a_plan(steps=()), 90))
    assert "Failed: n0 is gone" in texts(plan_lines(PEN, a_plan("failed", failed="n0 is gone"), 90))


def test_the_link_matrix_is_a_list_when_it_is_too_large() -> None:
    one = a_kv_detail().links[0]
    many = tuple(
        msgspec.structs.replace(one, prefill=f"p{p}", decode=f"d{d}", utilisation=(p + d) / 64)
        for p in range(32) for d in range(32)
    )  # fmt: skip
    found = picture(kv=msgspec.structs.replace(a_kv_detail(), links=many))
    said = texts(kv_lines(PEN, found, 100))
    assert "p31 → d31" in said
    assert "and 1012 links less busy" in said
    few: tuple[LinkView, ...] = many[:2]
    said = texts(kv_lines(PEN, picture(kv=msgspec.structs.replace(a_kv_detail(), links=few)), 100))
    assert "P → D" in said


def test_pools_come_first_among_the_blocks() -> None:
    pool = CacheView(id="pool-0", role="kv_pool", num_blocks=100, used_blocks=5, cached_blocks=90, free_blocks=5,
                     ssd_blocks=7, ssd_capacity_blocks=50, num_evicted=1, num_preemptions=0)  # fmt: skip
    detail = msgspec.structs.replace(a_kv_detail(), caches=(*a_kv_detail().caches, pool))
    said = texts(kv_lines(PEN, picture(kv=detail), 100))
    assert re.search(r"^pool-0 .*^cpu-0 +P prefill", said, re.DOTALL | re.MULTILINE)
    assert "7 of 50" in said
    assert "40.0%" in said


def test_a_row_is_followed_when_others_come() -> None:
    panel = Panel("requests")
    panel.draw(PEN, picture(), 120, 20)
    assert panel.chosen == "cmpl-1"
    newer = msgspec.structs.replace(records()[0], request_id="cmpl-9")
    panel.draw(PEN, picture(records=[newer, *records()]), 120, 20)
    assert panel.chosen == "cmpl-9", "nothing was chosen yet, so the newest is shown"
    panel.step(1)
    assert panel.chosen == "cmpl-1"
    panel.draw(PEN, picture(records=[newer, newer, *records()]), 120, 20)
    assert panel.chosen == "cmpl-1"
    panel.draw(PEN, picture(records=records()[1:]), 120, 20)
    assert panel.chosen is not None


def test_the_overview_says_which_objectives_are_missed_before_where_time_is_lost() -> None:
    said = texts(Panel("overview").draw(PEN, picture(fleet=fleet(missed_by={"tpot": 9, "ttft": 2})), 80, 18))
    assert "Missed: TPOT 9, TTFT 2  Those that miss lose most time in queue" in said


def test_those_that_wait_past_their_objective_are_told_with_the_reason() -> None:
    def drawn(**changes: object) -> str:
        lines = Panel("overview").draw(PEN, picture(fleet=fleet(queue_depth=180, **changes)), 80, 18)
        assert len(lines) == 18
        return " ".join(plain(one).rstrip() for one in lines)

    notice = say("notice.late")
    late = "180 wait for a place, 172 of them past their objective."
    assert "past their objective" not in drawn()
    assert late in drawn(queue_late=172)
    assert f"{late} {notice}" in drawn(queue_late=172, notice=str(notice), notice_said=notice)


def test_a_filter_says_how_much_is_hidden() -> None:
    panel = Panel("instances")
    panel.filter("decode")
    said = texts(panel.draw(PEN, picture(), 120, 20))
    assert 'only rows with "decode": 2 of 5' in said
    assert "pool-0" not in said


def a_past(instance_id: str, **fields: tuple[float | None, ...]) -> SeriesView:
    """Every ten seconds, to the moment shown."""
    num = max(map(len, fields.values()))
    times = tuple(int(START_S) + 599 - 10 * (num - 1 - index) for index in range(num))
    series = {f"instance.{instance_id}.{name}": Column(last=values) for name, values in fields.items()}
    return SeriesView(step_s=10.0, times=times, series=series)


def test_the_last_minutes_of_the_chosen_instance_are_drawn_and_its_gaps_left_empty() -> None:
    panel = Panel("instances")
    half = (0.01,) * 15 + (None,) * 15 + (0.02,) * 30
    shown = picture(past=a_past("n0", tpot_p50_s=half, num_waiting=(3.0,) * 60))
    panel.draw(PEN, shown, 120, 20)
    assert panel.chosen == "n0"
    said = texts(panel.detail(PEN, shown, 69)).splitlines()
    begins = next(at for at, one in enumerate(said) if one.startswith("TPOT p50 20.0 ms"))
    upper = said[begins + 1]
    assert upper.startswith(" 20.0 ms ")
    assert set(upper[9:37]) == {" "}, "half as much, then nothing"
    assert " " not in upper[41:].rstrip()
    lower = said[begins + 2] + said[begins + 3]
    assert set(said[begins + 2][26:36] + said[begins + 3][26:36]) == {" "}, lower
    assert any(one.startswith("waiting 3") for one in said)
    assert not any(one.startswith("KV use 0") for one in said), "nothing is known of it"
    wide = texts(panel.draw(PEN, shown, 200, 60))
    assert "waiting 3" in wide
    other = picture(past=a_past("n1", num_waiting=(3.0,) * 60))
    assert panel.detail(PEN, other, 69) == panel.detail(PEN, picture(), 69)


def test_the_state_at_the_moment_is_shown_in_the_table() -> None:
    then = ReplaySession(SEEN, "x").picture(Picture(), START_S + 301)
    assert "▽ draining" in texts(Panel("instances").draw(PEN, then, 120, 20))
