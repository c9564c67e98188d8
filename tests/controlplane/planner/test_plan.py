"""Plans: what there is and what it can become, what is simulated, which fleet is chosen and what the report says."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from controlplane.core.config import CoreConfig, check_config
from controlplane.core.policies.names import DEFAULT_POLICY
from controlplane.planner import plan as planner_plan
from controlplane.planner.bound import Bound
from controlplane.planner.capacity import Workload, estimate, highest
from controlplane.planner.commands import commands
from controlplane.planner.distserve import algorithm_1, algorithm_2, md1_wait_s
from controlplane.planner.fleets import Fleet, Inventory, Part, Shape, build, parse_current, parse_inventory, shapes
from controlplane.planner.judge import Judge, Judged
from controlplane.planner.plan import Wish, make_plan
from controlplane.planner.report import Input, PlanReport
from controlplane.planner.search import candidates
from controlplane.sim.driver import simulate
from controlplane.sim.spec import NodeSpec, SimConfig, SimResult
from nodes.shapes import shape
from transfer.errors import InvalidValue
from transfer.said import say
from transfer.terms import Role, Slo
from transfer.traces.cutting import cut
from transfer.traces.loading import Wanted, load_trace
from transfer.traces.request import TraceRequest

MODEL, BLOCK = "llama-3.1-8b", 512
LLAMA = shape(MODEL)
SLO = Slo(ttft_s=1.0, tpot_s=0.04)
TRACE = load_trace("generated:conversation", Wanted(num=120)).requests
SMALL = parse_inventory("2xH800,2xH20,1xCPU:kv_pool", MODEL, BLOCK)


def workload(slo: Slo = SLO, trace: list[TraceRequest] = TRACE, target: float = 0.9) -> Workload:
    return Workload(trace, {"default": slo}, LLAMA, BLOCK, target)


def config(policy: str = DEFAULT_POLICY) -> SimConfig:
    core = check_config(CoreConfig(policy=policy, classes={"default": SLO}))
    return SimConfig(core=core, model=MODEL, token_bytes=LLAMA.kv_token_bytes, block_size=BLOCK)


@dataclass
class Oracle(Judge):
    """In a judge's place: each fleet's rate is what `rates` says of it, so that choices can be tested without runs."""

    rates: dict[str, float] = field(default_factory=dict)
    factor: float = 0.5

    def __post_init__(self) -> None:
        super().__init__(TRACE, config(), LLAMA, 0.9, 100)
        self.asked: list[str] = []

    def judge(self, fleet: Fleet, guess: float, policy: str | None = None) -> Judged:
        self.asked.append(str(fleet))
        kind = "colocated" if fleet.is_colocated else "split"
        rate = self.rates.get(str(fleet), self.rates.get(kind, self.factor) * estimate(fleet, workload()))
        return Judged(fleet, rate, rate * 1.04, None, policy or "goodput")


# --- what there is -----------------------------------------------------------------------------------------------


def test_an_inventory_is_gpus_and_pools() -> None:
    found = parse_inventory("8xh800, 4xH20-96,8xH800,2xCPU:kv_pool+1TB", MODEL, BLOCK)
    assert [(one.hardware, one.num_gpus) for one in found.stocks] == [("H800", 16), ("H20", 4)]
    assert [(one.role, one.ssd_blocks > 0) for one in found.pools] == [(Role.KV_POOL, True)] * 2


@pytest.mark.parametrize("text", ["8xH800:prefill", "H800", "8xH80000", "2xCPU:kv_pool", "2000xH800", ""])
def test_what_is_no_inventory_is_told_in_a_sentence(text: str) -> None:
    with pytest.raises(InvalidValue):
        parse_inventory(text, MODEL, BLOCK)


def test_shapes_hold_the_weights_and_fill_the_stock() -> None:
    large = shape("llama-3-70b")
    stock = parse_inventory("16xH800", MODEL, BLOCK).stocks[0]
    found = shapes(stock, large, BLOCK)
    assert Shape("H800", 4) in found
    assert Shape("H800", 4, 2) in found
    assert all(2 < one.num_gpus <= 8 for one in found), "141 GB need three GPUs of 80 GB; one domain has eight"
    assert shapes(replace(stock, num_gpus=2), large, BLOCK) == []


def test_a_pipeline_prefills_as_many_prompts_at_once_as_it_has_stages() -> None:
    fleet = Fleet((Part(Shape("H800", 1, 2), Role.PREFILL, 1), Part(Shape("H20", 1, 2), Role.DECODE, 1)), SMALL.pools)
    nodes = build(fleet, LLAMA, BLOCK)
    assert [(node.id, node.num_gpus) for node in nodes] == [("p0.0", 1), ("p0.1", 1), ("d0", 2), ("k0", 0)]
    assert sum(node.price_per_hour for node in nodes) == pytest.approx(fleet.price_per_hour)
    whole = build(fleet, LLAMA, BLOCK, lanes=False)
    assert [node.num_blocks for node in nodes[:2]] == [whole[0].num_blocks // 2] * 2
    rates = workload().rates
    assert 1.8 < rates(Shape("H800", 1, 2)).prefill / rates(Shape("H800", 1)).prefill < 2.1


def test_the_current_fleet_is_written_as_simulate_takes_it() -> None:
    fleet = parse_current("2xH800@2:prefill,1xH20:decode", MODEL, BLOCK, SMALL.pools)
    assert str(fleet) == "2xH800@2:prefill,1xH20@1:decode,1xCPU:kv_pool"
    assert (fleet.xpyd, fleet.num_gpus) == ("2P1D", 5)


# --- what is looked at -------------------------------------------------------------------------------------------


def test_the_highest_rate_is_found_from_any_guess() -> None:
    for guess, edge in itertools.product((0.1, 3.0, 70.0), (0.9, 5.0)):
        low, high = highest(lambda rate, edge=edge: rate <= edge, guess, 0.03)
        assert low <= edge < high <= low * 1.031
    assert highest(lambda rate: False, 1.0, 0.03)[0] == 0.0


def test_candidates_cover_splits_hardware_of_each_role_budgets_and_colocation() -> None:
    found = candidates(SMALL, workload(trace=load_trace("generated:summarise", Wanted(num=120)).requests))
    fleets = [one.fleet for one in found]
    assert [one.forecast for one in found] == sorted((one.forecast for one in found), reverse=True)
    assert any(fleet.is_colocated for fleet in fleets)
    assert any(fleet.num_gpus < 4 for fleet in fleets)
    split = next(one for one in found if not one.fleet.is_colocated)
    assert {part.role: part.shape.hardware for part in split.fleet.parts}[Role.PREFILL] == "H800", (
        "it has 7 x the FLOPs"
    )
    assert any(part.shape.hardware == "H20" and part.role is Role.DECODE for part in split.fleet.parts)
    assert all(sum(p.count * p.shape.num_gpus for p in f.parts if p.shape.hardware == "H20") <= 2 for f in fleets)


def test_objectives_that_no_instance_meets_leave_no_candidate() -> None:
    with pytest.raises(InvalidValue, match="loosen --slo"):
        candidates(SMALL, workload(Slo(ttft_s=1.0, tpot_s=0.0005)))


def test_the_closed_forms_order_fleets_as_the_simulator_does() -> None:
    """Not the values, for which there is simulation, but the better of two clearly different fleets, where prompts are
    computed where the fleet says."""
    good = Fleet((Part(Shape("H800", 1), Role.PREFILL, 2), Part(Shape("H20", 1), Role.DECODE, 2)))
    bad = Fleet((Part(Shape("H20", 1), Role.PREFILL, 2), Part(Shape("H800", 1), Role.DECODE, 2)))
    load = workload()
    assert load.max_rate(good) > 1.5 * load.max_rate(bad)
    rate = load.max_rate(good) * 0.6
    attained = [
        simulate(build(fleet, LLAMA, BLOCK), cut(TRACE, rate=rate), config("slo")).attainment for fleet in (good, bad)
    ]  # fmt: skip
    assert attained[0] > attained[1] + 0.2


# --- what is chosen ----------------------------------------------------------------------------------------------


@pytest.fixture
def no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a bound hears that a hundred requests a second are possible."""

    def upper_bound(nodes: object, trace: list[TraceRequest], *more: object) -> Bound:
        rate = (len(trace) - 1) / (trace[-1].at_s - trace[0].at_s)
        return Bound(len(trace) * (rate <= 100.0), len(trace), 0, rate, ((("time", "1 x T"), 1.0),), "free", 0.0, "")

    monkeypatch.setattr(planner_plan, "upper_bound", upper_bound)


def plan(judge: Oracle, wish: Wish, inventory: Inventory = SMALL) -> PlanReport:
    return make_plan(inventory, workload(), judge, wish, [Input("model", MODEL, False)], [say("divide.prices")])


@pytest.mark.usefixtures("no_bound")
def test_it_disaggregates_where_that_serves_more() -> None:
    found = plan(Oracle(rates={"colocated": 0.2}), Wish(baselines=False))
    assert found.disaggregate
    assert found.verdict.startswith("Disaggregate: ")
    assert found.margin is not None
    assert found.margin > 0.05
    others = [one for one in found.alternatives if re.fullmatch(r"\d+M", one.xpyd)]
    assert found.chosen.max_rate == pytest.approx(max(one.max_rate for one in others) * (1 + found.margin))


@pytest.mark.usefixtures("no_bound")
def test_it_does_not_where_that_serves_hardly_more() -> None:
    judge = Oracle(rates={"colocated": 10.0})
    found = plan(judge, Wish(baselines=False))
    assert not found.disaggregate
    assert found.verdict.startswith("Do not disaggregate: ")
    best_split = max(one.max_rate for one in found.alternatives if not re.fullmatch(r"\d+M", one.xpyd))
    near = {"colocated": 10.0 * best_split * 1.03 / found.chosen.max_rate}
    assert plan(Oracle(rates={"colocated": near["colocated"] / 1.06}), Wish(baselines=False)).disaggregate is False
    assert plan(Oracle(rates={"colocated": near["colocated"] / 1.2}), Wish(baselines=False)).disaggregate is True


@pytest.mark.usefixtures("no_bound")
def test_a_rate_is_served_by_the_cheapest_fleet_and_a_budget_is_kept() -> None:
    judge = Oracle()
    most = plan(judge, Wish(baselines=False)).chosen
    cheap = plan(Oracle(), Wish(rate=most.max_rate / 4, baselines=False)).chosen
    assert cheap.max_rate >= most.max_rate / 4
    assert cheap.price_per_hour < most.price_per_hour / 1.5
    capped = plan(Oracle(), Wish(budget=most.price_per_hour / 2, baselines=False)).chosen
    assert capped.price_per_hour <= most.price_per_hour / 2
    with pytest.raises(InvalidValue, match="lower --rate"):
        plan(Oracle(), Wish(rate=most.max_rate * 100, baselines=False))
    with pytest.raises(InvalidValue, match="raise --budget"):
        plan(Oracle(), Wish(budget=0.01, baselines=False))
    with pytest.raises(InvalidValue, match="loosen --slo"):
        plan(Oracle(factor=0.0), Wish(baselines=False))


@pytest.mark.usefixtures("no_bound")
def test_the_frontier_rises_with_the_price() -> None:
    found = plan(Oracle(), Wish(baselines=False)).frontier
    assert len(found) > 3
    assert all(a.price_per_hour < b.price_per_hour and a.max_rate < b.max_rate for a, b in itertools.pairwise(found))


@pytest.mark.usefixtures("no_bound")
def test_doing_nothing_is_among_the_alternatives() -> None:
    current = parse_current("1xH800:mixed", MODEL, BLOCK, ())
    found = plan(Oracle(), Wish(baselines=False, current=current))
    assert [one.fleet for one in found.alternatives if "doing nothing" in one.label] == ["1xH800@1:mixed"]


# --- what to type ------------------------------------------------------------------------------------------------


def test_the_command_is_a_rebalance_where_the_instances_are_there() -> None:
    one, other = Shape("H800", 4), Shape("H20", 4)
    split = Fleet((Part(one, Role.PREFILL, 3), Part(one, Role.DECODE, 5)))
    assert commands(split, Fleet((Part(one, Role.MIXED, 8),)), MODEL) == ("phaseplane rebalance 3P5D",)
    assert commands(split, Fleet((Part(one, Role.MIXED, 7),)), MODEL)[0].startswith("PHASEPLANE_TP=4 phaseplane up")
    mixed = Fleet((Part(one, Role.PREFILL, 1), Part(other, Role.DECODE, 2)), SMALL.pools)
    found = commands(mixed, None, MODEL)
    assert found == (
        "PHASEPLANE_TP=4 phaseplane up --engine emulated --prefill 1 --decode 2 --mixed 0 --pool 1 "
        f"--model {MODEL} --hardware H800,H20",
    )
    lines = commands(Fleet((Part(one, Role.PREFILL, 1), Part(Shape("H20", 2), Role.DECODE, 3))), None, MODEL)
    assert [re.findall(r"--tp (\d) --instance=(\S+)", line)[0] for line in lines] == [
        ("4", "prefill-0=prefill"), ("2", "decode-{0..2}=decode"),
    ]  # fmt: skip


# --- DistServe ---------------------------------------------------------------------------------------------------


def test_the_simulator_waits_as_a_queue_of_equal_prompts_does() -> None:
    """M/D/1 (DistServe, 3.1) against one simulated prefill instance of the same service time."""
    fleet = Fleet((Part(Shape("H800", 1), Role.PREFILL, 1), Part(Shape("H800", 1), Role.DECODE, 1)))
    nodes = build(fleet, LLAMA, BLOCK)
    nodes = (replace(nodes[0], token_budget=4096), replace(nodes[1], link_bytes_per_s=1e15))
    assert nodes[0].latency is not None
    service_s = nodes[0].latency.prefill_s(4096)
    rate = 0.6 / service_s
    times = load_trace("generated:poisson", Wanted(num=600, rate=rate)).requests
    trace = [TraceRequest(at_s=one.at_s, prompt_tokens=4096, output_tokens=1) for one in times]
    nodes = (nodes[0], replace(nodes[1], latency=replace(nodes[0].latency, alpha_s=0.0, mbu=100.0)))
    core = check_config(CoreConfig(policy="distserve", classes={"default": Slo(ttft_s=60.0, tpot_s=1.0)}))
    result = simulate(nodes, trace, SimConfig(core=core, model=MODEL, token_bytes=1.0, block_size=BLOCK))
    mean = sum(record.ttft_s or 0.0 for record in result.records) / len(trace)
    assert mean == pytest.approx(md1_wait_s(rate, service_s), rel=0.1)


def test_md1_forms() -> None:
    assert md1_wait_s(0.0, 2.0) == 2.0
    assert md1_wait_s(0.25, 2.0) == pytest.approx(2.0 + 0.25 * 4 / (2 * 0.5))
    assert md1_wait_s(0.25, 2.0, stages=2) == pytest.approx(2.0 + 0.25 * 4 / (4 * 1.5))
    assert md1_wait_s(0.25, 2.0, tp_speedup=1.5) == pytest.approx(2 / 1.5 + 0.25 * 4 / (2 * 1.5 * (1.5 - 0.5)))
    assert md1_wait_s(0.5, 2.0) == math.inf


class Phases(Judge):
    """In a judge's place: an instance of any phase serves as many requests as closed forms say, and not one more."""

    def run(
        self, nodes: tuple[NodeSpec, ...], rate: float, policy: str, what: str, trace: object = None
    ) -> SimResult:  # fmt: skip
        self.num_runs += 1
        load, capacities = workload(), []
        for role in (Role.PREFILL, Role.DECODE):
            own = [node for node in nodes if node.role is role and node.id != "other" and node.latency is not None]
            if own:
                latency = own[0].latency
                assert latency is not None
                capacities.append(getattr(load.rates(Shape(own[0].hardware, latency.tp, latency.pp)), role.value))
        good = 100 if rate <= min(capacities) else 0
        return SimResult((), 0.0, 1.0, 1.0, 1.0, good, 100, 0, 0, 0)


def test_a_wanted_rate_is_tried_itself() -> None:
    """Bisection to 4 % would leave it open whether a fleet serves just that."""
    part = Part(Shape("H20", 1), Role.PREFILL, 1)
    fleet = Fleet((part, Part(Shape("H20", 1), Role.DECODE, 1)))
    limit = min(workload().rates(part.shape)[:2])
    for wanted, served in ((limit * 0.999, True), (limit * 1.001, False)):
        judge = Phases(TRACE, config(), LLAMA, 0.9, 100, wanted=wanted)
        assert (judge.judge(fleet, limit * 0.7).max_rate >= wanted) is served


def test_algorithms_1_and_2_replicate_the_best_of_each_phase_and_of_pairs() -> None:
    inventory, load = parse_inventory("8xH20", MODEL, BLOCK), workload()
    judge = Phases(TRACE, config(), LLAMA, 0.9, 100)
    first = algorithm_1(inventory, load, judge)
    assert first is not None
    assert first.fleet.num_gpus <= 8
    prefill, decode = (
        sum(part.count * getattr(load.rates(part.shape), role.value) for part in first.fleet.parts if part.role is role)
        for role in (Role.PREFILL, Role.DECODE)
    )
    assert first.rate == pytest.approx(min(prefill, decode), rel=0.1)
    small = algorithm_1(inventory, load, judge, rate=first.rate / 3)
    assert small is not None
    assert small.fleet.num_gpus < first.fleet.num_gpus
    second = algorithm_2(inventory, load, judge)
    assert second is not None
    one, other = second.fleet.parts
    assert one.count == other.count
    assert one.shape.pp == other.shape.pp
    assert second.fleet.num_gpus <= 8


# --- the program -------------------------------------------------------------------------------------------------
