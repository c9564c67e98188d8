"""What a simulation says of a fleet: records, costs, faults, role switches, and the recording of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from sim_kit import BLOCK, MODEL, anything, config, fleet, node, request, run, workload

from controlplane.core.config import CoreConfig
from controlplane.core.recorder import FlightRecorder, effects_digest, replay
from controlplane.sim.driver import Simulation, simulate
from controlplane.sim.spec import Fault, Order
from nodes.shapes import shape
from transfer.errors import InvalidValue
from transfer.terms import Role, Slo


def test_one_request_takes_what_its_profile_says() -> None:
    nodes = fleet("p0 d0")
    _, result = run(nodes, [request(prompt=100, output=11)], config())
    record, profile = result.records[0], nodes[0].latency
    assert profile is not None
    assert (record.outcome, record.finish_reason, record.prefill, record.decode) == ("ok", "length", "p0", "d0")
    compute_s, step_s = profile.prefill_s(99), profile.decode_step_s(1, 100)
    link_s = 7 * BLOCK * shape(MODEL).kv_token_bytes / (nodes[0].link_bytes_per_s * profile.link_efficiency)
    exposed_s = max(link_s - compute_s, 0.0) + link_s / shape(MODEL).num_layers
    assert record.ttft_s == pytest.approx(compute_s + exposed_s + step_s, rel=0.02)
    assert record.tpot_s == pytest.approx(profile.decode_step_s(1, 105), rel=1e-3)
    assert record.e2e_s == pytest.approx(record.ttft_s + 10 * record.tpot_s)
    assert (result.good, result.counted, result.rejected, result.attainment) == (1, 1, 0, 1.0)
    assert result.span_s == pytest.approx(record.e2e_s)
    assert result.gpu_s == pytest.approx(2 * result.span_s)
    assert result.dollars == pytest.approx(1.4 * result.span_s / 3600)


def test_equal_runs_give_equal_records_and_another_seed_other_noise() -> None:
    nodes, trace, made = anything(3)
    assert simulate(nodes, trace, made).records == simulate(nodes, trace, made).records
    noisy = fleet("p0 d0", latency_error=0.2)
    first, second = (simulate(noisy, [request()], config(seed=seed)).records[0].e2e_s for seed in (1, 2))
    assert first != second


def test_no_instance_stands_still_while_work_waits() -> None:
    """Two prompts on one prefill instance follow one another without a gap."""
    nodes = fleet("p0 d0 d1")
    _, result = run(nodes, [request(prompt=200, output=1), request(prompt=200, output=1)], config())
    profile = nodes[0].latency
    assert profile is not None
    last_s = max(record.ttft_s or 0.0 for record in result.records)
    whole_s = profile.step_s(256, 256, 2, 0) + profile.step_s(142, 398, 1, 0)
    assert last_s < whole_s + 2 * profile.decode_step_s(1, 200) + 0.01


def test_a_shared_front_is_found_where_it_was_computed() -> None:
    blocks = tuple(range(10))
    trace = [request(10.0 * i, prompt=10 * BLOCK + 1, output=2, blocks=blocks, block_tokens=BLOCK) for i in range(3)]
    _, result = run(fleet("p0 d0"), trace, config())
    assert [record.cached_tokens for record in result.records] == [0, 10 * BLOCK, 10 * BLOCK]
    other = [request(10.0 * i, prompt=10 * BLOCK + 1, output=2) for i in range(3)]
    assert [record.cached_tokens for record in run(fleet("p0 d0"), other, config())[1].records] == [0, 0, 0]


def test_a_pool_gives_what_its_instances_have_evicted() -> None:
    """The instances hold one long prompt each; the pool holds them all."""
    fronts = [tuple(100 * i + place for place in range(100)) for i in range(3)]
    trace = [request(5.0 * i, prompt=100 * BLOCK + 20, output=2, blocks=fronts[i % 3], block_tokens=BLOCK)
             for i in range(6)]  # fmt: skip
    nodes = [*fleet("p0 d0", num_blocks=110), node("k0", 1000)]
    _, result = run(nodes, trace, config())
    assert [record.fetched_tokens > 0 for record in result.records] == [False] * 3 + [True] * 3
    assert {record.kv_source for record in result.records[3:]} == {"k0"}
    _, cold = run([*fleet("p0 d0", num_blocks=110), node("k0", 120, ssd_blocks=1000)], trace, config())
    assert sum(record.fetched_tokens for record in cold.records) > 0


def test_a_straggler_is_slower_and_gets_less() -> None:
    trace = [request(0.05 * i, prompt=50, output=100) for i in range(60)]
    slow = config(faults=(Fault(at_s=0.0, kind="slow", instance="d0", duration_s=60.0, factor=4.0),))
    _, result = run(fleet("p0 d0 d1"), trace, slow)
    counts = [sum(record.decode == name for record in result.records) for name in ("d0", "d1")]
    assert counts[0] < counts[1]
    worst = max(record.tpot_s or 0.0 for record in result.records if record.decode == "d0")
    best = min(record.tpot_s or 1.0 for record in result.records if record.decode == "d1")
    assert worst > 3 * best


def test_an_operator_moves_an_instance_and_its_requests_migrate() -> None:
    trace = [request(0.02 * i, prompt=50, output=400) for i in range(12)]
    made = config(orders=(Order(at_s=1.0, xpyd="2P1D"),))
    simulation, result = run(fleet("p0 d0 d1"), trace, made)
    assert result.num_moves == 1
    assert {record.outcome for record in result.records} == {"ok"}
    assert sum(record.num_migrations for record in result.records) >= 1
    assert sorted(one.role for one in simulation.world.nodes.values()) == [Role.DECODE, Role.PREFILL, Role.PREFILL]


def test_a_killed_instance_joins_again_and_serves() -> None:
    trace = [request(0.5 * i, prompt=50, output=100) for i in range(40)]
    faults = (Fault(at_s=2.0, kind="kill", instance="d0", duration_s=5.0),)
    simulation, result = run(fleet("p0 d0"), trace, config(faults=faults))
    assert {record.outcome for record in result.records} == {"ok"}
    assert max(record.num_resumes for record in result.records) >= 1
    assert simulation.world.nodes["d0"].epoch == 2


def test_what_does_not_end_in_time_is_timed_out_or_refused() -> None:
    dead = (Fault(at_s=0.5, kind="kill", instance="d0"),)
    made = config(faults=dead, core=CoreConfig(rejoin_grace_s=5.0))
    _, result = run(fleet("p0 d0"), [request(prompt=50, output=500)], made)
    assert (result.records[0].outcome, result.rejected) == ("error", 1)  # 503, as the gateway calls it
    _, late = run(fleet("p0 d0"), [request(prompt=50, output=2000)], config(timeout_s=3.0))
    assert late.records[0].outcome == "timed_out"
    assert 0 < late.records[0].output_tokens < 2000
    assert late.rejected == 0


def test_too_much_is_refused_and_counted() -> None:
    tight = CoreConfig(classes={"default": Slo(ttft_s=0.2, tpot_s=0.2)}, early_reject="objective", policy="slo")
    trace = [request(0.0, prompt=500, output=5) for _ in range(40)]
    _, result = run(fleet("p0 d0", num_blocks=400), trace, config(core=tight))
    assert 0 < result.rejected < 40
    assert result.rejected == sum(record.outcome == "rejected" for record in result.records)  # all of them 429


@pytest.mark.parametrize("policy", ["goodput", "slo", "conductor", "kv_cost", "colocated"])
def test_decisions_do_not_depend_on_how_many_candidates_are_explained(policy: str) -> None:
    """A simulation that keeps no decisions explains only the chosen one. Some requests are late here, which may change
    what is looked at."""
    nodes = [*fleet("p0 p1 p2 d0 d1 m0 m1", num_blocks=80), node("k0", 60)]
    core = CoreConfig(classes={"default": Slo(ttft_s=0.5, tpot_s=0.2)}, policy=policy)
    kept, bare = (
        simulate(nodes, workload(3), config(core=core, keep_decisions=keeps)).records for keeps in (True, False)
    )
    assert max(len(record.why) for record in kept) > max(len(record.why) for record in bare) == 1
    assert [replace(one, why=()) for one in kept] == [replace(one, why=()) for one in bare]


@pytest.mark.parametrize("seed", [2, 5])
def test_a_recording_of_a_simulation_replays_to_the_same_effects(seed: int) -> None:
    nodes, trace, made = anything(seed)
    simulation = Simulation(nodes, trace, made)
    codec = FlightRecorder(simulation.core.config, 1, made.seed)
    frames, digests, handle = [codec.header()], [], simulation.core.handle

    def watched(event: object, now: float) -> object:
        effects = handle(event, now)  # type: ignore[arg-type]
        digests.append(effects_digest(effects))
        return effects

    simulation.core.handle = watched  # type: ignore[method-assign, assignment]
    simulation.journal = lambda now, event: frames.append(codec.entry(now, event))
    simulation.run()
    assert [step.digest for step in replay(frames)] == digests
    assert len(digests) > 150


def test_what_cannot_work_is_said() -> None:
    with pytest.raises(InvalidValue, match="same id"):
        simulate(fleet("p0 p0"), [request()], config())
    with pytest.raises(InvalidValue, match="no latency profile"):
        simulate(fleet("p0", latency=None), [request()], config())
    with pytest.raises(InvalidValue, match="does not have"):
        simulate(fleet("p0 d0"), [request()], config(faults=(Fault(at_s=0.0, kind="kill", instance="x"),)))
    with pytest.raises(InvalidValue, match="no fault 'explode'"):
        simulate(fleet("p0 d0"), [request()], config(faults=(Fault(at_s=0.0, kind="explode", instance="d0"),)))
    with pytest.raises(InvalidValue, match="divides 40"):
        simulate(fleet("p0 d0"), [request(prompt=100, blocks=(1, 2), block_tokens=40)], config())


def test_an_empty_trace_is_over_at_once() -> None:
    result = simulate(fleet("p0 d0"), [], config())
    assert (result.records, result.span_s, result.counted, result.cost_per_good) == ((), 0.0, 0, None)
