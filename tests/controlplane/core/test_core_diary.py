"""What of the autopilot outlives the control plane: told to the shell when it changes, and taken up again."""

from __future__ import annotations

from core_fluid import Mix, World
from core_kit import config
from msgspec.structs import replace

from controlplane.core.events import AutopilotKept, AutopilotRestored, AutopilotState, AutopilotWanted, Effect, Looked
from transfer.autopilot import AutopilotRequest, LookRow, PinRequest

CALM = Mix(4, 3000, 300)


def told(world: World, seconds: float = 1.0) -> list[Effect]:
    found: list[Effect] = []
    world.take = found.extend  # type: ignore[method-assign]
    world.run(seconds)
    return [one for one in found if isinstance(one, AutopilotKept | Looked)]


def steer(world: World, **change: object) -> AutopilotState:
    """What is kept after it."""
    world.autopilot.wanted(AutopilotWanted(ask_id="a", **change))  # type: ignore[arg-type]
    (kept,) = [one.state for one in world.desk.take() if isinstance(one, AutopilotKept)]
    return kept


def reborn(state: AutopilotState, age_s: float = 0.0, mode: str = "advise") -> World:
    world = World("2P2D", lambda _: CALM, config(autopilot=mode))
    world.autopilot.restored(AutopilotRestored(state=state, age_s=age_s))
    return world


def test_mode_limits_and_pins_are_kept_at_once_and_taken_up_again() -> None:
    world = World("2P2D", lambda _: CALM, config(autopilot="advise"))
    steer(world, change=AutopilotRequest(mode="auto", floor=2, max_moves=1))
    steer(world, pin=PinRequest(subject="split", why="a test", actor="alice"))
    state = steer(world, pin=PinRequest(subject="p0", ttl_s=100.0))
    view = reborn(state, age_s=40.0).autopilot.view(0.0)
    assert (view.mode, view.settings.floor, view.settings.max_moves) == ("auto", 2, 1)
    assert [(one.subject, one.who, one.left_s, one.why) for one in view.pins] == [
        ("split", "alice", None, "a test"), ("p0", "operator", 60.0, ""),
    ]  # fmt: skip
    assert [one.subject for one in reborn(state, age_s=200.0).autopilot.view(0.0).pins] == ["split"], "p0's is over"
    released = steer(world, unpin="split")
    assert [one.subject for one in released.pins] == ["p0"]


def test_settings_that_were_changed_meanwhile_hold() -> None:
    state = steer(World("2P2D", lambda _: CALM, config(autopilot="advise")), change=AutopilotRequest(mode="auto"))
    assert reborn(state, mode="off").autopilot.mode == "off"
    assert reborn(replace(state, configured=("off", 1, None)), mode="off").autopilot.mode == "auto"


def test_an_operators_plan_pins_for_the_next_life_too_and_time_alone_tells_nothing() -> None:
    world = World("2P2D", lambda _: CALM, config(autopilot="advise", pin_s=100.0))
    assert [one for one in told(world, 20) if isinstance(one, AutopilotKept)] == []
    world.operator("3P1D")
    kept = [one.state for one in told(world, 20) if isinstance(one, AutopilotKept)]
    assert [[one.subject for one in state.pins] for state in kept] == [["split"]]


def test_looks_that_say_the_same_are_one_row_with_a_count() -> None:
    world = World("2P2D", lambda now: CALM, config(autopilot="advise"))
    rows = [one.row for one in told(world, 150) if isinstance(one, Looked)]
    last: dict[str, LookRow] = {row.look_id: row for row in rows}
    assert sum(row.num for row in last.values()) > 100 - 20, "but for the last few"
    assert len(rows) < 8
    assert {row.code for row in rows} == {"measuring", "met"}
    assert len(last) == 2, "the seconds that it takes yet are numbers only"
    counts = [row.num for row in rows if row.code == "met"]
    assert counts == sorted(counts)
    assert rows[-1].began_at == -1.5 * (rows[-1].num - 1)
    assert rows[-1].ended_at == 0.0
