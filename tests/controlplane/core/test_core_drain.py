"""Draining an instance: running requests migrate, nothing is lost, whatever fails on the way."""

from __future__ import annotations

from core_kit import Rig, config, only, sends, sent, those
from core_plans import apply, drain, plan, report

from controlplane.core.events import (
    Expect,
    Finished,
    NeedTokens,
    NodeLost,
    Resume,
)
from controlplane.core.lifecycle import RequestState
from transfer.terms import Role
from transfer.wire.messages import (
    Abort,
    Holding,
    Migrate,
    MigrateFailed,
    Released,
    Reserve,
    ReserveRefused,
    RoleOrder,
)


def test_running_decodes_migrate_a_few_at_a_time_and_no_client_sees_it() -> None:
    """sglang#28403, kthena#1589, dynamo#11173: the controller drains and migrates, streams go on."""
    rig = Rig(config(max_migrations=2))
    rig.fleet("1P2D")
    drain(rig, 8)
    here = [one for one in range(8) if rig.request(f"r{one}").decode == "d0"]
    assert len(here) == 4
    moving = [one for one in sends(rig.all_effects, Reserve) if one[1].generation == 2]
    assert [name for name, _ in moving] == ["d1", "d1"]
    assert all(message.remote and message.generation == 2 for _, message in moving)
    assert rig.core.plans()[0].steps[0].status == "draining"
    for _ in range(4):
        name = next(f"r{one}" for one in here if rig.core.request(f"r{one}").move is not None)  # type: ignore[union-attr]
        effects = rig.reserved(name, have=16)
        assert only(effects, Expect).generation == 2
        source, migrate = sent(effects, Migrate)
        assert (source, migrate.generation, migrate.target_generation, migrate.have_tokens) == ("d0", 1, 2, 16)
        assert migrate.target.instance_id == "d1"
        rig.received(name)
        one = rig.request(name)
        assert (one.state, one.decode, one.generation, one.num_migrations) == (RequestState.DECODING, "d1", 2, 1)
        rig.node("d0", Released(request_id=name, generation=1, num_blocks=7))
        rig.tick()
    assert not those(rig.all_effects, NeedTokens)
    assert sent(rig.all_effects, RoleOrder)[0] == "d0"
    assert rig.core.plans()[0].steps[0].num_migrated == 4
    report(rig, "d0", Role.PREFILL)
    rig.beat("d0")
    assert rig.core.plans()[0].status == "done"
    for index in range(8):
        record = only(rig.end(f"r{index}"), Finished).record
        assert record.num_migrations == (index in here)
    rig.at_rest()


def test_nothing_new_is_placed_on_a_draining_instance() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    drain(rig, 1)
    for index in range(4):
        rig.arrive(f"n{index}")
        assert rig.request(f"n{index}").decode == "d1"


def test_a_failed_migration_stays_where_it_runs_and_is_tried_elsewhere() -> None:
    rig = Rig()
    rig.fleet("1P3D")
    drain(rig, 1)
    first = rig.request("r0").move
    assert first is not None
    rig.reserved("r0")
    effects = rig.node("d0", MigrateFailed(request_id="r0", generation=1, reason="the target refused"))
    assert sent(effects, Abort)[1].generation == 2
    second = rig.request("r0").move
    assert second is not None
    assert (second.generation, second.target != first.target) == (3, True)
    effects = rig.end("r0")
    assert {name for name, _ in sends(effects, Abort)} == {"d0", second.target}, "it may have ended on either"
    rig.release(rig.all_effects)
    rig.at_rest()


def test_without_room_anywhere_a_drain_waits_for_the_end() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    rig.beat("d1", free_blocks=0)
    drain(rig, 1)
    assert rig.request("r0").move is None
    rig.tick()
    assert rig.core.plans()[0].steps[0].status == "draining"
    rig.end("r0")
    assert sent(rig.effects, RoleOrder)[0] == "d0"


def test_a_refused_target_is_not_the_end_of_it() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    drain(rig, 1)
    rig.node("d1", ReserveRefused(request_id="r0", generation=2, reason="full", retry=True, free_blocks=0))
    assert rig.request("r0").state is RequestState.DECODING
    rig.beat("d1")
    assert rig.request("r0").state is RequestState.MIGRATING


def test_a_source_that_dies_while_moving_costs_a_resume() -> None:
    rig = Rig()
    rig.fleet("1P3D")
    drain(rig, 1)
    rig.reserved("r0")
    target = rig.request("r0").move.target  # type: ignore[union-attr]
    effects = rig.do(NodeLost(instance_id="d0"))
    assert only(effects, NeedTokens)
    assert [name for name, _ in sends(effects, Abort)] == [target]
    assert rig.core.plans()[0].status == "failed"
    assert "was lost" in str(rig.core.plans()[0].failed)
    rig.do(Resume(request_id="r0", tokens=rig.request("r0").tokens, num_output=0))
    assert rig.request("r0").generation == 3


def test_a_target_that_dies_costs_nothing_while_the_source_has_it() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    drain(rig, 1)
    rig.reserved("r0")
    rig.do(NodeLost(instance_id="d1"))
    assert not those(rig.effects, NeedTokens)
    rig.node("d0", MigrateFailed(request_id="r0", generation=1, reason="the target is gone"))
    assert rig.request("r0").state is RequestState.DECODING
    assert rig.request("r0").decode == "d0"


def test_a_target_that_dies_after_it_took_over_costs_a_resume() -> None:
    rig = Rig()
    rig.fleet("1P3D")
    drain(rig, 1)
    rig.reserved("r0")
    rig.do(NodeLost(instance_id=rig.request("r0").move.target))  # type: ignore[union-attr]
    effects = rig.node("d0", Released(request_id="r0", generation=1, num_blocks=7))
    assert only(effects, NeedTokens)


def test_a_migration_that_nobody_confirms_is_resumed_from_what_was_delivered() -> None:
    rig = Rig(config(migrate_timeout_s=5.0))
    rig.fleet("1P2D")
    drain(rig, 1)
    rig.reserved("r0")
    rig.holding["d0"] = (Holding(request_id="r0", generation=1, num_blocks=7),)
    seen = rig.wait(6.0, ["p0", "d0", "d1"])
    assert only(seen, NeedTokens)
    assert {(name, message.generation) for name, message in sends(seen, Abort)} == {("d0", 1), ("d1", 2)}


def test_a_prefill_drain_waits_for_its_prompts() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    rig.arrive("r0", 2000)
    name = str(rig.request("r0").prefill)
    made = plan(rig, moves={name: "decode"})
    apply(rig, made.plan_id)
    assert rig.core.plans()[0].steps[0].status == "draining"
    rig.reserved("r0")
    assert not sends(rig.all_effects, RoleOrder)
    rig.started("r0")
    rig.done("r0")
    assert sent(rig.all_effects, RoleOrder)[0] == name


def test_a_drain_that_takes_too_long_is_given_up_and_the_instance_serves_again() -> None:
    """dynamo#12428: roll back on failure."""
    rig = Rig(config(drain_timeout_s=3.0, lease_s=30.0))
    rig.fleet("1P2D")
    rig.beat("d1", free_blocks=0)
    drain(rig, 1)
    rig.wait(4.0, ["p0", "d0"])
    found = rig.core.plans()[0]
    assert (found.status, found.steps[0].status) == ("failed", "rolled_back")
    assert "still holds 1 requests" in str(found.failed)
    assert rig.instance("d0").ready
    rig.arrive("n0")
    assert rig.request("n0").decode == "d0"


def test_a_request_that_ends_as_it_moves_leaves_no_reservation() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    drain(rig, 1)
    rig.reserved("r0")
    rig.node("d0", Released(request_id="r0", generation=1, num_blocks=7))
    effects = rig.end("r0")
    assert [name for name, _ in sends(effects, Abort)] == ["d1"]
    rig.release(effects)
    rig.at_rest()
