"""What a fleet's state means for both screens: verdicts, troubles, shares, advice, what an undo takes back."""

from __future__ import annotations

import msgspec
import pytest
from top_fakes import fleet, instances
from ui_fakes import a_kv_detail, a_plan, an_autopilot

from ui.insight import (
    Trouble,
    advised,
    last_done,
    links,
    other_roles,
    stage_shares,
    troubles,
    verdict,
    with_changes,
)
from ui.words import words


@pytest.mark.parametrize(
    ("attainment", "kind"), [(0.97, "met"), (0.9, "met"), (0.89, "missed"), (None, "idle"), (0.0, "missed")]
)
def test_the_verdict_is_attainment_against_the_target(attainment: float | None, kind: str) -> None:
    assert verdict(fleet(recent_attainment=attainment), 0.9).kind == kind


def test_trouble_comes_before_quality_and_is_named() -> None:
    views = list(instances())
    views[0] = msgspec.structs.replace(views[0], state="lost")
    views[1] = msgspec.structs.replace(views[1], last_seen_s=4.0)
    found = verdict(fleet(instances=tuple(views), orphaned_kv_blocks=3), 0.9)
    assert found.kind == "degraded"
    assert found.troubles == (Trouble("lost", ("n0",)), Trouble("silent", ("n1",)), Trouble("orphaned", number=3))
    no_decode = tuple(view for view in instances() if view.role != "decode")
    assert troubles(fleet(instances=no_decode)) == [Trouble("unserved", ("decode",))]
    one_mixed = (msgspec.structs.replace(instances()[0], role="mixed"),)
    assert troubles(fleet(instances=one_mixed)) == []


def test_objectives_that_were_changed_are_named_until_the_window_is_theirs() -> None:
    (one,) = fleet().classes
    changed = [msgspec.structs.replace(one, name=name, judged_for_s=age_s)
               for name, age_s in (("a", 20.0), ("b", 59.0), ("c", 60.0), ("d", None))]  # fmt: skip
    said = with_changes("Objectives met", fleet(classes=tuple(changed)), words("en"))
    assert said == "Objectives met; changed 20 s ago: a, b"
    assert with_changes("Objectives met", fleet(classes=tuple(changed[2:])), words("en")) == "Objectives met"


def test_stages_are_shares_in_the_order_of_a_request() -> None:
    shares = stage_shares({"decode": 1.0, "queue": 3.0, "new_stage": 4.0})
    assert [(name, share) for name, _, share in shares if share] == [
        ("queue", 0.375), ("decode", 0.125), ("new_stage", 0.5)
    ]  # fmt: skip
    assert stage_shares({}) == []
    assert stage_shares({"queue": 0.0}) == []


def test_only_an_advised_move_is_offered() -> None:
    assert advised(an_autopilot()) == {"n3": "decode"}
    hold = msgspec.structs.replace(an_autopilot().evaluations[0], code="unsure")
    assert advised(an_autopilot(shown=hold)) == {}
    assert advised(None) == {}
    assert other_roles(instances()[0]) == ("decode", "mixed")
    assert other_roles(instances()[-1]) == ()


def test_undo_takes_the_newest_plan_that_stands() -> None:
    first, second = a_plan("done", plan_id="plan-1"), a_plan("done", plan_id="plan-2")
    undo = a_plan("done", plan_id="plan-3", undo_of="plan-2")
    assert last_done([undo, second, first]) == first
    assert last_done([second, first]) == second
    assert last_done([msgspec.structs.replace(undo, status="failed"), second]) == second
    assert last_done([a_plan("planned"), a_plan("failed")]) is None
    assert last_done([a_plan("done", steps=())]) is None


def test_links_make_a_matrix() -> None:
    rows, columns, by_pair = links(a_kv_detail())
    assert (rows, columns) == (["cpu-0"], ["cpu-1"])
    assert by_pair["cpu-0", "cpu-1"].num_bytes == 3000
