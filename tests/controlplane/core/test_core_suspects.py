"""A request that makes engines fail: told from ordinary deaths, run alone, ended at its third; the others complete."""

from __future__ import annotations

import msgspec
import pytest
from core_kit import Rig, config, hello, only, sends, those

from controlplane.core.events import Effect, Fail, Finished, FirstToken, NeedTokens, NodeLost, Resume
from controlplane.core.lifecycle import RequestState
from controlplane.core.scheduler import SchedulerCore
from controlplane.core.suspects import is_suspect
from transfer.errors import ConfigError
from transfer.terms import Role
from transfer.wire.messages import Goodbye, KvReceived, RequestLost, Reserve

FAILED = "the instance failed: EngineFailed"


class Colony(Rig):
    """A Rig whose instances die and return under the next epoch."""

    def die(self, name: str, reason: str = FAILED) -> list[Effect]:
        one = self.instance(name)
        effects = self.node(name, Goodbye(epoch=one.epoch, reason=reason))
        for need in those(effects, NeedTokens):
            effects += self.resume(need.request_id)
        return effects

    def back(self, name: str) -> list[Effect]:
        one = self.instance(name)
        effects = self.node(name, hello(name, one.role, epoch=one.epoch + 1))
        return effects + self.beat(name)

    def resume(self, request_id: str) -> list[Effect]:
        one = self.request(request_id)
        return self.do(Resume(request_id=request_id, tokens=one.tokens, num_output=one.num_output))

    def run(self, request_id: str) -> str:
        """Bring a placed request to where its decode instance computes for it. Returns that instance."""
        self.reserved(request_id)
        self.started(request_id)
        if self.request(request_id).prefill is not None:
            self.done(request_id)
            self.received(request_id)
        return str(self.request(request_id).decode)

    def suspects(self, *names: str) -> None:
        """Let these requests share a batch on d0 twice."""
        for turn in range(2):
            for name in names:
                self.run(name)
                assert self.request(name).decode == "d0", turn
            self.die("d0")
            self.back("d0")
        assert all(is_suspect(self.core._desk, self.request(name)) for name in names)


def colony(shape: str = "1P1D", *names: str, **changes: object) -> Colony:
    rig = Colony(config(**changes))
    rig.fleet(shape)
    for name in names:
        rig.arrive(name)
    return rig


def test_a_request_whose_engine_fails_three_times_ends_in_a_clear_error_and_takes_no_fourth_life() -> None:
    rig = colony("1P1D", "poison")
    rig.suspects("poison")
    assert rig.request("poison").prefill is None, "alone: nobody else computes for it"
    rig.run("poison")
    fail = only(rig.die("d0"), Fail)
    assert (fail.status, fail.kind) == (500, "internal")
    assert "its engine failed three times while it ran" in fail.message
    assert "EngineFailed" in fail.message
    record = only(rig.end("poison", outcome="error", by_node=False), Finished).record
    assert (record.outcome, record.num_resumes) == ("error", 2)
    rig.back("d0")
    assert rig.core.metrics() | {"engine_failures_total": 3.0, "poisonous_requests_total": 1.0} == rig.core.metrics()
    rig.at_rest()


@pytest.mark.parametrize("reason", ["stopped by a signal", "the instance failed: RuntimeError"])
def test_ordinary_deaths_blame_nobody(reason: str) -> None:
    rig = colony("1P1D", "r1")
    for turn in range(6):
        rig.run("r1")
        if turn % 2:
            rig.die("d0", reason)
        else:
            for need in those(rig.do(NodeLost(instance_id="d0")), NeedTokens):
                rig.resume(need.request_id)
        rig.back("d0")
    assert rig.request("r1").blame == []
    assert rig.core.metrics()["engine_failures_total"] == 0.0


def test_innocents_of_the_same_batches_run_and_are_cleared_when_the_culprit_is_found() -> None:
    rig = colony("1P1D", "a", "poison", "b")
    rig.suspects("a", "poison", "b")
    assert rig.core.metrics()["requests_suspected"] == 3.0
    assert rig.run("a") == "d0"
    assert {rig.request(name).state for name in ("poison", "b")} == {RequestState.QUEUED}
    assert not those(rig.all_effects, Fail)
    rig.end("a")
    rig.run("poison")
    assert rig.request("b").state is RequestState.QUEUED
    fail = only(rig.die("d0"), Fail)
    assert fail.request_id == "poison"
    assert not is_suspect(rig.core._desk, rig.request("b"))
    rig.end("poison", outcome="error", by_node=False)
    rig.back("d0")
    assert rig.request("b").prefill == "p0", "served as anybody else"
    rig.run("b")
    rig.end("b")
    rig.at_rest()


def test_nothing_is_put_beside_a_suspect() -> None:
    rig = colony("1P1D", "s")
    rig.suspects("s")
    rig.run("s")
    rig.arrive("new")
    assert rig.request("new").state is RequestState.QUEUED
    assert "set aside" in str(rig.request("new").waits_for)
    rig.end("s")
    assert rig.run("new") == "d0"


def test_a_suspect_holds_nobody_up_while_other_instances_serve() -> None:
    rig = colony("1P2D")
    rig.arrive("s")
    for _ in range(2):
        name = rig.run("s")
        rig.die(name)
        rig.back(name)
    home = rig.run("s")
    for index in range(8):
        rig.arrive(f"n{index}")
        assert rig.run(f"n{index}") != home
    assert rig.instance(home).rows == 1
    rig.end("s")
    rig.arrive("later")
    assert rig.request("later").decode == home, "the instance is open again"


def test_a_suspect_waits_until_its_instance_is_empty_and_others_wait_for_it_then() -> None:
    rig = colony("1P", "n", "s", "late")
    rig.request("s").blame = [1, 2]
    rig.request("late").spec = msgspec.structs.replace(rig.request("late").spec, priority=9)
    rig.join("d0", Role.DECODE)
    rig.run("n")
    assert rig.request("s").state is RequestState.QUEUED
    assert "runs alone on d0 as soon as that is empty" in str(rig.request("s").waits_for)
    assert rig.request("late").state is RequestState.QUEUED
    rig.end("n")
    assert rig.request("s").state is RequestState.RESERVING
    rig.run("s")
    assert rig.request("late").state is RequestState.QUEUED
    rig.end("s")
    assert rig.run("late") == "d0"


def test_at_most_half_of_the_instances_are_set_aside() -> None:
    suspects = [f"s{index}" for index in range(40)]
    rig = colony("1P", *suspects)
    for name in suspects:
        rig.request(name).blame = [1, 2]
    for index in range(4):
        rig.join(f"d{index}", Role.DECODE)
    held = sorted(rig.core._desk.held)
    assert sorted(str(rig.request(name).decode) for name in suspects if rig.request(name).decode) == held
    assert len(held) == 2
    for index in range(6):
        rig.arrive(f"n{index}")
        assert rig.request(f"n{index}").state is not RequestState.QUEUED, "suspects in line hold nobody up"
        assert rig.request(f"n{index}").decode not in held


def test_an_instance_opens_again_as_soon_as_its_suspect_is_cleared() -> None:
    rig = colony("1P", "poison", "a")
    for name in ("poison", "a"):
        rig.request(name).blame = [1, 2]
    for index in range(4):
        rig.join(f"d{index}", Role.DECODE)
    home, other = rig.run("poison"), rig.run("a")
    assert only(rig.die(home), Fail).request_id == "poison"
    for name in {"d0", "d1", "d2", "d3"} - {home, other}:
        rig.beat(name, free_blocks=0)
    rig.arrive("n")
    assert rig.request("n").decode == other


def test_running_requests_are_not_moved_onto_an_instance_that_is_set_aside() -> None:
    rig = colony("1P", "s")
    rig.request("s").blame = [1, 2]
    rig.join("d0", Role.DECODE)
    rig.join("d1", Role.DECODE)
    home = rig.run("s")
    rig.do(FirstToken(request_id="s"))
    other = "d1" if home == "d0" else "d0"
    rig.decoding("n")
    migrations = rig.core._migrations
    assert not migrations.start(rig.request("n"), rig.instance(other)), "nowhere to go but beside the suspect"
    assert not migrations.start(rig.request("s"), rig.instance(home)), "a suspect stays where it is alone"
    rig.join("d2", Role.DECODE)
    assert migrations.start(rig.request("n"), rig.instance(other))
    rig.die("d2")
    assert rig.request("n").blame == [], "the target only prepared to take it over"


def test_who_only_waits_on_a_failing_instance_is_not_blamed() -> None:
    rig = colony("1P1D", without_prefill="refuse")
    rig.arrive("reserving")
    rig.arrive("receiving")
    rig.reserved("receiving")
    rig.started("receiving")
    rig.die("d0")
    assert rig.request("reserving").blame == rig.request("receiving").blame == []
    rig.back("d0")
    rig.reserved("receiving")
    rig.die("p0")
    assert rig.request("receiving").blame == [], "its prompt was still in line there"
    rig.back("p0")
    rig.reserved("receiving")
    rig.started("receiving")
    rig.die("p0")
    assert rig.request("receiving").blame == [3]


def test_a_leg_that_names_its_engine_counts_too() -> None:
    rig = colony("1P1D", "r1")
    for generation in (1, 2, 3):
        rig.run("r1")
        effects = rig.node("d0", RequestLost(request_id="r1", generation=generation, reason=f"{FAILED} on this row"))
        if generation < 3:
            rig.resume("r1")
    assert "three times" in only(effects, Fail).message


def test_a_failure_of_an_older_placement_is_not_counted() -> None:
    rig = colony("1P2D", "r1")
    first = rig.run("r1")
    rig.do(NodeLost(instance_id=first))
    rig.resume("r1")
    rig.node(first, RequestLost(request_id="r1", generation=1, reason=FAILED))
    assert rig.request("r1").blame == []


def test_the_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"max_engine_failures \(2\) must be above suspect_after \(2\)"):
        SchedulerCore(config(max_engine_failures=2), 1, 0)


def test_a_suspect_that_fits_nowhere_is_told_so() -> None:
    rig = colony("1P1D", "s")
    rig.suspects("s")
    rig.request("s").unfit["d0"] = "it never fits d0"
    rig.reserved("s")
    effects = rig.node("d0", RequestLost(request_id="s", generation=3, reason="lease over"))
    effects += rig.resume("s")
    assert "never fits" in only(effects, Fail).message
    assert not sends(effects, Reserve | KvReceived)  # type: ignore[arg-type]
