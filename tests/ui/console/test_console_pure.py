"""The console's pure parts: markup, charts, shapes, views, the trail, previews, the planner's report."""

from __future__ import annotations

import msgspec
import pytest
from ui_fakes import a_fleet, a_plan, a_record

from transfer.api import AuditRow, FleetState, Goodput, InstanceView, ModelView, Plan, Prediction
from transfer.said import say
from transfer.screens import Column as Values
from transfer.screens import SeriesView
from transfer.terms import Slo
from ui.console import charts
from ui.console.broadcast import Scene
from ui.console.markup import Column, table, tag
from ui.console.planning import flags_of, read_report
from ui.console.plans import effect_table, ended
from ui.console.screens.audit import matching
from ui.console.screens.instances import actions, instance_table, past_of
from ui.console.screens.planner import present
from ui.console.screens.requests import choose, waterfall
from ui.console.screens.traffic import tally
from ui.console.shapes import Group, groups, moves
from ui.console.style import style_sheet
from ui.console.trail import SPAN_S, Trail
from ui.console.views import draw, models, verdict_text
from ui.words import words

EN = words("en", {})


def an_instance(id: str, role: str, **more: object) -> InstanceView:
    view = InstanceView(id=id, role=role, state="ready", hardware="H800", model="m", epoch=1)
    return msgspec.structs.replace(view, **more)


def scene(fleet: FleetState, trail: Trail | None = None, audit: tuple[AuditRow, ...] = ()) -> Scene:
    return Scene(fleet, 0.1, "http://fleet", trail or Trail(), audit)


def test_everything_but_markup_is_escaped():
    inner = tag("b", "<i>")
    assert tag("p", inner, '"&', title='"><script>') == (
        '<p title="&#34;&gt;&lt;script&gt;"><b>&lt;i&gt;</b>&#34;&amp;</p>'
    )
    assert tag("line", x1=1.5, class_="a", y1=None) == '<line x1="1.5" class="a"/>'
    drawn = table([Column("a"), Column("b", True)], [("<x>", "1")], "c")
    assert '<th scope="row">&lt;x&gt;</th><td class="n">1</td>' in drawn
    assert "<caption>c</caption>" in drawn


def test_a_line_breaks_where_nothing_is_known_and_is_drawn_to_scale():
    drawn = charts.lines(
        [charts.Line("x", "goodput", [(0.0, 0.0), (1.0, None), (2.0, 2.0), (4.0, 2.0)])], 0.0, 4.0,
        title="t", value=str, time=str,
    )  # fmt: skip
    path = drawn.split(' d="')[1].split('"')[0]
    assert path == "M52.0 196.0M500.0 10.0L948.0 10.0"
    assert [charts.nice_top(value) for value in (0, 0.9, 1, 3, 4.1, 6, 81)] == [1, 1, 1, 4, 5, 8, 100]


def test_steppers_become_the_fewest_moves_and_the_idle_go_first():
    members = [an_instance("a", "prefill", num_running=3), an_instance("b", "prefill"), an_instance("c", "decode")]
    assert list(groups([*members, an_instance("p", "kv_pool"), an_instance("x", "decode", state="lost")])) == [
        Group("m", "H800")
    ]
    assert moves(members, {"prefill": 1, "decode": 2, "mixed": 0}) == {"b": "decode"}
    assert moves(members, {"prefill": 2, "decode": 1, "mixed": 0}) == {}
    assert moves(members, {"prefill": 0, "decode": 0, "mixed": 3}) == {"a": "mixed", "b": "mixed", "c": "mixed"}


def test_the_figures_on_screen_are_those_of_the_api():
    goodput = Goodput(per_s=5.25, per_gpu=0.875, throughput_per_s=6.0, cost_per_good=0.00042)
    fleet = a_fleet(goodput=goodput, recent_attainment=0.875, queue_depth=2, in_flight=1234, stages_s={"queue": 3.0})
    parts = draw(scene(fleet), "en").parts
    for text in ("1P1D", "5.25/s", "0.875/s", "87.5%", "$0.00042", "1,234"):
        assert f"<dd>{text}</dd>" in parts["figures"]
    assert "queue 3.00 s, 100.0%" in parts["stages"]
    assert parts["tiles"].count("pp-tile ") == len(fleet.instances)
    assert ">P<" in parts["tiles"]
    assert "TTFT 2.00 s, TPOT 200.0 ms" in parts["classes"]


def test_those_that_wait_past_their_objective_are_told_with_the_reason():
    parts = draw(scene(a_fleet(queue_depth=180)), "en").parts
    assert "past their objective" not in parts["figures"]
    assert "pp-notice" not in parts["advice"]
    notice = say("notice.late")
    fleet = a_fleet(queue_depth=180, queue_late=172, notice=str(notice), notice_said=notice)
    parts = draw(scene(fleet), "en").parts
    assert "<dt>queue</dt><dd>180</dd></div><div" in parts["figures"]
    assert "<dt>past their objective</dt><dd>172</dd>" in parts["figures"]
    assert 'class="pp-notice">Requests past their objective wait' in parts["advice"]


@pytest.mark.parametrize("lang", ["en", "zh-Hant"])
def test_several_models_are_told_apart(lang: str):
    two = (ModelView(name="m"), ModelView(name="<n>", recent_good=1, recent_total=4, recent_per_s=0.5))
    drawn = models(two, words(lang))
    assert words(lang).say("console.traffic.models") in drawn
    assert "&lt;n&gt;" in drawn
    assert "25.0%" in drawn
    assert "0.50/s" in drawn


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"recent_attainment": 0.95}, "met", "95.0%"),
        ({"recent_attainment": 0.5}, "missed", "50.0%"),
        ({}, "idle", "60 s"),
        ({"orphaned_kv_blocks": 7, "recent_attainment": 1.0}, "degraded", "7 KV blocks"),
    ],
)
def test_the_verdict_says_what_is_broken_before_whether_objectives_are_met(changes, kind: str, says: str):
    found, text = verdict_text(scene(a_fleet(**changes)), EN)
    assert found == kind
    assert says in text


def test_the_verdict_says_which_objectives_were_changed_just_now():
    (one,) = a_fleet().classes
    fleet = a_fleet(recent_attainment=1.0, classes=(msgspec.structs.replace(one, judged_for_s=20.0),))
    assert verdict_text(scene(fleet), EN)[1].endswith("; changed 20 s ago: default")


def test_overview_says_which_objectives_are_missed():
    fleet = a_fleet(stages_s={"queue": 1.0}, missed_by={"tpot": 9, "ttft": 2})
    assert "<p>Missed: TPOT 9, TTFT 2</p>" in draw(scene(fleet), "en").parts["stages"]
    assert "Missed" not in draw(scene(a_fleet(stages_s={"queue": 1.0})), "en").parts["stages"]


def test_charts_of_an_instance_have_what_is_known_of_it():
    lead = "instance.n.1."
    past = SeriesView(step_s=2.0, times=(100, 102, 104), series={
        f"{lead}num_running": Values(last=(1.0, None, 3.0)), f"{lead}num_waiting": Values(last=(0.0, 0.0, 0.0)),
        f"{lead}kv_use": Values(last=(0.1, 0.2, 0.3)), f"{lead}tpot_p50_s": Values(last=(None, None, None)),
    })  # fmt: skip
    drawn = past_of("n.1", past, EN)
    assert "TPOT" not in drawn, "nothing ended there"
    assert drawn.count("<svg") == 2
    assert '<th scope="row">now</th><td class="n">3</td><td class="n">0</td>' in drawn
    assert "30%" in drawn


def test_pages_are_drawn_anew_when_what_may_be_done_changes():
    fleet = a_fleet()
    drawn = draw(scene(fleet), "en").fleet
    assert draw(scene(msgspec.structs.replace(fleet, in_flight=9)), "en").fleet == drawn
    cordoned = msgspec.structs.replace(fleet.instances[0], state="cordoned")
    others = ({"version": 5}, {"instances": (cordoned, fleet.instances[1])}, {"instances": fleet.instances[:1]})
    assert drawn not in {draw(scene(a_fleet(**changes)), "en").fleet for changes in others}


def test_what_a_fleet_says_cannot_become_markup():
    fleet = a_fleet(advice="<img src=x onerror=alert(1)>", recent_attainment=1.0)
    bad = msgspec.structs.replace(fleet.instances[0], id="<script>", hardware='"><b>')
    drawn = draw(scene(msgspec.structs.replace(fleet, instances=(bad,))), "zh-Hant").parts
    for part in drawn.values():
        assert "<script" not in part
        assert "<img" not in part
        assert '"><b>' not in part


def test_the_trail_begins_with_the_series_and_goes_on_with_frames():
    trail = Trail()
    past = SeriesView(step_s=1.0, times=(100, 101, 102), series={"goodput_per_s": Values(last=(1.0, None, 2.0))})
    trail.take(past)
    assert [(point.at_s, point.goodput) for point in trail.points] == [(100.0, 1.0), (102.0, 2.0)]
    trail.add(102.0, a_fleet())  # of a moment that is known
    trail.add(103.5, a_fleet())
    assert [point.goodput for point in trail.points] == [1.0, 2.0, 1.5]
    trail.add(103.5 + SPAN_S, a_fleet())
    assert [point.at_s for point in trail.points] == [103.5, 103.5 + SPAN_S]
    trail.add(60.0 + SPAN_S, a_fleet())
    assert trail.end_s == 103.5 + SPAN_S
    trail.add(40.0, a_fleet())
    assert [point.at_s for point in trail.points] == [40.0], "its clock was set back"


def test_marks_of_the_audit_log_stand_in_the_chart():
    trail = Trail()
    trail.add(1000.0, a_fleet())
    rows = (AuditRow(at_s=990.0, actor="alice", action="apply", subject="plan-1"),
            AuditRow(at_s=1.0, actor="bob", action="apply", subject="plan-0"))  # fmt: skip
    chart = draw(scene(a_fleet(), trail, rows), "en").parts["chart"]
    assert "alice: apply plan-1" in chart
    assert "bob" not in chart


def test_attainment_under_other_objectives_counts_as_the_control_plane_does():
    good = a_record()
    records = [
        good,
        msgspec.structs.replace(good, ttft_s=3.0),
        msgspec.structs.replace(good, tpot_s=None, output_tokens=1),
        msgspec.structs.replace(good, outcome="error", ttft_s=None),
        msgspec.structs.replace(good, outcome="cancelled"),
        msgspec.structs.replace(good, outcome="cancelled", ttft_s=None, e2e_s=9.0),
    ]
    assert tally(records, Slo(ttft_s=2.0, tpot_s=0.2)) == (2, 5)
    assert tally(records, Slo(ttft_s=4.0, tpot_s=0.2)) == (3, 5)
    assert tally(records, Slo(ttft_s=2.0, tpot_s=0.001)) == (1, 5)
    assert tally([], Slo(ttft_s=1.0, tpot_s=1.0)).attainment is None


def test_requests_are_chosen_by_what_is_wanted():
    fast, slow = a_record(), msgspec.structs.replace(a_record(), request_id="cmpl-2", ttft_s=9.0, good=False)
    lost = msgspec.structs.replace(a_record(), request_id="cmpl-3", outcome="error", good=False, ttft_s=None)
    records = [fast, slow, lost]
    assert [one.request_id for one in choose(records, "slowest")] == ["cmpl-2", "cmpl-3", "cmpl-1"]
    assert [one.request_id for one in choose(records, "missed")] == ["cmpl-2", "cmpl-3"]
    assert [one.request_id for one in choose(records, "failed")] == ["cmpl-3"]
    assert [one.request_id for one in choose(records, "newest", "-2")] == ["cmpl-2"]
    assert "left:16.67%;width:50.00%" in waterfall(fast, EN)  # prefill begins where the queue ended, of 0.3 s


def test_actions_are_those_that_the_state_allows():
    assert actions(an_instance("a", "decode")) == ("cordon", "drain", "move")
    assert actions(an_instance("a", "decode", state="cordoned")) == ("resume", "drain", "move")
    assert actions(an_instance("a", "kv_pool")) == ("cordon", "drain")
    assert actions(an_instance("a", "decode", state="lost")) == ()
    assert "pp-role-decode" in instance_table((an_instance("a", "decode"),), EN)


def test_an_instances_price_is_its_whole_price_and_its_tpot_the_median():
    drawn = instance_table((an_instance("a", "decode", num_gpus=4, price_per_hour=8.0, tpot_p50_s=0.02),), EN)
    assert [text in drawn for text in ("$8.00", ">20.0 ms<", "$32.00")] == [True, True, False]


def test_a_plan_has_ended_when_its_effect_is_measured():
    being = Prediction(duration_s=1.0, basis="goodput is being measured")
    known = Prediction(duration_s=1.0, goodput_per_s=4.0)
    plan = a_plan("done", measured=being)
    assert not ended(plan)
    assert ended(msgspec.structs.replace(plan, measured=known))
    assert ended(a_plan("failed"))
    assert not ended(a_plan("applying"))
    row = effect_table(msgspec.structs.replace(plan, measured=known), a_fleet(), EN).split("<tr>")[2]
    assert [text in row for text in ("1.50/s", "2.00/s", "1.00/s \u2026 3.00/s", "4.00/s")] == [True] * 4


def test_audit_rows_are_found_by_any_word():
    rows = [AuditRow(at_s=1.0, actor="alice", action="apply", subject="plan-1", detail="2P1D to 1P2D")]
    assert matching(rows, "ALICE", words("en")) == rows
    assert matching(rows, "1p2d", words("en")) == rows
    assert matching(rows, "bob", words("en")) == []


def test_the_present_fleet_is_named_as_the_planner_names_it():
    views = (an_instance("a", "prefill", num_gpus=4), an_instance("b", "decode"), an_instance("p", "kv_pool"))
    assert present(views) == ("5xH800", "1xH800:decode,1xH800@4:prefill")
    assert flags_of({"fleet": "5xH800", "rate": 0.0, "current": "", "json": True}) == ["--fleet=5xH800", "--json"]


def test_the_planners_report_is_read_with_the_chosen_fleet_first():
    row = {
        "label": "chosen", "fleet": "f", "xpyd": "1P1D", "num_gpus": 2, "price_per_hour": 3.0, "max_rate": 5.0,
        "low": 4.0, "high": 6.0, "per_gpu": 2.5, "per_dollar": 1.0, "cost_per_good": None, "attainment": 0.9,
        "policy": "slo", "forecast": None, "note": "", "label_said": [{"code": "planner.colocated"}],
        "note_said": None,
    }  # fmt: skip
    other = row | {"fleet": "g", "label": "now"}
    said = {"code": "planner.free"}
    report = {
        "verdict": "v", "verdict_said": said, "bottleneck_said": said, "warnings_said": [said],
        "chosen": row, "alternatives": [row, other], "possible_rate": 6.0, "of_possible": 0.83,
        "bottleneck": "prefill", "warnings": ["w"], "commands": ["phaseplane up"],
        "frontier": [{"price_per_hour": 3.0, "max_rate": 5.0, "fleet": "f", "simulated": True}],
    }  # fmt: skip
    found = read_report(msgspec.json.encode(report))
    assert [one.fleet for one in found.rows] == ["f", "g"]
    assert found.frontier == ((3.0, 5.0, "f"),)


def test_both_themes_have_every_colour_of_the_looks():
    sheet = style_sheet()
    for group in ("role-prefill", "state-lost", "verdict-missed", "stage-transfer", "ground"):
        assert sheet.count(f"--pp-{group}:") == 2


def test_a_plan_of_nothing_has_ended():
    plan: Plan = a_plan("done", steps=())
    assert ended(plan)
