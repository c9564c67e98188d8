"""The bound is above whatever is simulated, and the optimum where that is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from msgspec.structs import replace
from planner_cases import BLOCK, SPARSE, config, node, profile, traffic

from controlplane.core.policies.names import POLICY_NAMES
from controlplane.planner import program as planner_program
from controlplane.planner.bound import Bound, upper_bound
from controlplane.planner.charges import VIEWS, Device, Sizes, View, decode_s, prefill_s
from controlplane.planner.prefixes import prefixes
from controlplane.planner.program import Load, Option, Program, solve
from controlplane.sim.driver import simulate
from controlplane.sim.spec import NodeSpec
from transfer.terms import Role, Slo
from transfer.traces.request import TraceRequest

FAST, SLOW = profile(4.0, 0.05), profile(1.0, 0.08)
FLEETS = {
    "1P1D": [node("p0", Role.PREFILL, FAST), node("d0", Role.DECODE, SLOW)],
    "1M": [node("m0", Role.MIXED, SLOW)],
    "2P1D1M of two kinds": [
        node("p0", Role.PREFILL, FAST), node("p1", Role.PREFILL, SLOW), node("d0", Role.DECODE, FAST),
        node("m0", Role.MIXED, SLOW),
    ],
    "KV-tight": [node("p0", Role.PREFILL, FAST), node("d0", Role.DECODE, FAST, num_blocks=160)],
    "few rows": [node("m0", Role.MIXED, FAST, max_running=4), node("m1", Role.MIXED, FAST, max_running=4)],
}  # fmt: skip


def bound(nodes: list[NodeSpec], trace: list[TraceRequest], slo: Slo, **options: object) -> Bound:
    return upper_bound(nodes, trace, {"default": slo}, block_size=BLOCK, **options)  # type: ignore[arg-type]


def _stays_below(name: str, policy: str, seed: int, rate: float) -> None:
    nodes, trace, slo = FLEETS[name], traffic(seed, 50, rate), Slo(ttft_s=0.4, tpot_s=0.012)
    most = bound(nodes, trace, slo)
    result = simulate(nodes, trace, config(slo, policy))
    assert result.good <= most.good + 1e-3
    assert most.good <= most.counted == len(trace)


@pytest.mark.parametrize("name", FLEETS)
def test_no_policy_serves_more_than_the_bound(name: str) -> None:
    _stays_below(name, "goodput", 1, 60.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_no_policy_serves_more_than_the_bound_whatever_comes(name: str, policy: str) -> None:
    for seed, rate in enumerate((4.0, 15.0, 40.0, 150.0)):
        _stays_below(name, policy, seed, rate)


def test_more_instances_and_looser_objectives_never_lower_it() -> None:
    trace, slo = traffic(7, 80, 80.0), Slo(ttft_s=0.3, tpot_s=0.01)
    nodes = FLEETS["1P1D"]
    first = bound(nodes, trace, slo).good
    assert 0 < first < len(trace), "the case has to be one in which not all fit"
    for more in (node("p1", Role.PREFILL, FAST), node("d1", Role.DECODE, SLOW), node("m1", Role.MIXED, SLOW)):
        assert bound([*nodes, more], trace, slo).good >= first * (1 - 1e-3)
    for looser in (Slo(ttft_s=0.5, tpot_s=0.01), Slo(ttft_s=0.3, tpot_s=0.02)):
        assert bound(nodes, trace, looser).good >= first * (1 - 1e-3)
    assert bound(nodes, trace, slo, roles="free").good >= first * (1 - 1e-3)
    assert bound(nodes, trace, Slo(ttft_s=0.3, tpot_s=0.01, e2e_s=0.35)).good <= first * (1 + 1e-3)


def test_prompts_that_come_at_once_are_the_optimum_of_one_instance_after_another() -> None:
    nodes = [node("p0", Role.PREFILL, FAST, token_budget=1024), node("d0", Role.DECODE, profile(0.01, 10.0))]
    trace = [TraceRequest(at_s=0.0, prompt_tokens=1024, output_tokens=1) for _ in range(30)]
    step_s = nodes[1].latency.decode_step_s(1, 1024)  # type: ignore[union-attr]
    prompt_s = FAST.prefill_s(1024)
    for fit in (1, 3, 7):
        found = bound(nodes, trace, Slo(ttft_s=fit * prompt_s + step_s, tpot_s=1.0))
        in_time = sum(number * prompt_s + step_s <= fit * prompt_s + step_s + 1e-9 for number in range(1, 31))
        # the decode instance computes a little, too: prompts that come at once are its work as well
        assert in_time == fit
        assert fit - 1e-6 <= found.good <= fit * 1.01 + fit * prompt_s / profile(0.01, 10.0).prefill_s(1024) + 1e-6


@pytest.mark.parametrize("latency", [profile(20.0, 0.02), profile(4.0, 4.0), profile(2.0, 0.05, dp=2)])
def test_answers_are_as_many_as_one_batch_within_tpot_holds(latency: object) -> None:
    assert isinstance(latency, type(FAST))
    nodes = [node("m0", Role.MIXED, latency, num_blocks=100_000)]
    output, context = 400, 3000
    tpot_s = latency.decode_step_s(24, 24 * (context + output // 2)) * 1.0001
    rows = max(b for b in range(1, 257) if latency.decode_step_s(b, b * (context + output // 2)) <= tpot_s)
    one = TraceRequest(
        at_s=0.0, prompt_tokens=context, output_tokens=output, blocks=tuple(range(context // BLOCK)), block_tokens=BLOCK
    )  # fmt: skip
    ttft_s = latency.prefill_s(context)
    found = bound(nodes, [one] * 200, Slo(ttft_s=2 * ttft_s, tpot_s=tpot_s))
    in_time = 1 + 2 * ttft_s / (tpot_s * (output - 1))
    assert rows * 0.99 <= found.good <= rows * in_time * 1.05


def test_kv_room_and_rows_bound_what_runs() -> None:
    latency = profile(20.0, 0.02)
    trace = [TraceRequest(at_s=place / 10, prompt_tokens=160, output_tokens=2000) for place in range(150)]
    slo = Slo(ttft_s=0.2, tpot_s=1.5 * latency.decode_step_s(64, 64 * 1200))
    free = bound([node("m0", Role.MIXED, latency, num_blocks=100_000)], trace, slo).good
    tight = bound([node("m0", Role.MIXED, latency, num_blocks=500)], trace, slo).good
    few = bound([node("m0", Role.MIXED, latency, num_blocks=100_000, max_running=16)], trace, slo).good
    assert tight < 0.5 * free
    assert few < 0.75 * free


def test_what_no_instance_can_do_in_time_is_hopeless() -> None:
    nodes = FLEETS["1P1D"]
    slo = Slo(ttft_s=0.5, tpot_s=0.05)
    easy = TraceRequest(at_s=0.0, prompt_tokens=100, output_tokens=10)
    for hard in (replace(easy, prompt_tokens=60_000), replace(easy, output_tokens=80_000)):
        found = bound(nodes, [easy, hard], slo)
        assert (found.good, found.hopeless, found.counted) == (1.0, 1, 2)
    assert bound(nodes, [easy], Slo(ttft_s=0.5, tpot_s=1e-4)).good == 0.0
    assert bound(nodes[:1], [easy], slo).good == 0.0, "nobody decodes"
    assert bound(nodes, [], slo).attainment == 0.0


def test_classes_without_objectives_do_not_count_and_unknown_ones_are_the_default() -> None:
    trace = [
        replace(TraceRequest(at_s=0.0, prompt_tokens=50, output_tokens=5), traffic_class=name)
        for name in ("", "batch", "other")
    ]  # fmt: skip
    slos = {"default": Slo(ttft_s=1.0, tpot_s=0.1), "batch": None}
    assert upper_bound(FLEETS["1M"], trace, slos, block_size=BLOCK).counted == 2


def test_shared_prefixes_are_computed_once() -> None:
    def request(tokens: int, *blocks: int) -> TraceRequest:
        return TraceRequest(at_s=0.0, prompt_tokens=tokens, output_tokens=1, blocks=blocks, block_tokens=2 * BLOCK)

    trace = [request(100, 1, 2, 3), request(100, 1, 2, 4), request(64, 1, 2), request(100, 9, 2), request(40)]
    found = prefixes(trace, BLOCK)
    # 96 tokens of the first are whole blocks; the second shares 64; the third 48, since one token is always computed
    assert found.unseen.tolist() == [100, 36, 16, 100, 40]
    assert found.own.tolist() == [36, 36, 0, 100, 40]
    assert prefixes([request(100, 1, 2, 3)] * 2, BLOCK).unseen.tolist() == [100, 4]


def _all_packed(jobs: list[tuple[float, float, float]], capacity: float) -> int:
    """Most jobs (work, start, end) that fit, by Hall's condition on every subset and interval."""
    times = sorted({time for _, start, end in jobs for time in (start, end)})
    best = 0
    for chosen in itertools.product((0, 1), repeat=len(jobs)):
        kept = [job for job, one in zip(jobs, chosen, strict=True) if one]
        fits = all(
            sum(work for work, start, end in kept if s <= start and end <= t) <= capacity * (t - s) + 1e-9
            for s, t in itertools.combinations(times, 2)
        )
        best = max(best, len(kept) if fits else 0)
    return best


def _program(jobs: list[tuple[float, float, float]], speeds: tuple[float, ...] = (1.0,)) -> Program:
    """Each job on one of machines of different speed."""
    work, start, end = (np.array(values) for values in zip(*jobs, strict=True))
    options = [
        Option(np.ones(len(jobs), dtype=bool), [Load(place, work / speed, start, end)])
        for place, speed in enumerate(speeds)
    ]  # fmt: skip
    return Program(len(jobs), [options], [1.0] * len(speeds))


def _jobs(draw: np.random.Generator, num: int, span_s: float) -> list[tuple[float, float, float]]:
    starts = draw.uniform(0, span_s, num)
    return [(float(draw.uniform(0.2, 1.5)), float(start), float(start + draw.uniform(0.5, 2.5))) for start in starts]


def test_the_program_is_above_the_best_packing_and_below_what_intervals_hold() -> None:
    draw = np.random.default_rng(3)
    for _ in range(20):
        jobs = _jobs(draw, 9, 4.0)
        found = solve(_program(jobs))
        assert found.is_tight
        assert found.value >= _all_packed(jobs, 1.0) - 1e-6
        # the smallest jobs of any interval, in parts: an optimum by greed, so a bound of its own
        for s, t in itertools.combinations(sorted({time for _, *window in jobs for time in window}), 2):
            inside = sorted(work for work, start, end in jobs if s <= start and end <= t)
            full = np.cumsum(inside)
            most = len(jobs) - len(inside) + float(np.interp(t - s, [0.0, *full], range(len(inside) + 1)))
            assert found.value <= most * (1 + 1e-3)


def test_putting_jobs_together_stays_above_and_near(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = _jobs(np.random.default_rng(4), 120, 12.0)
    exact = solve(_program(jobs, (2.0, 3.0)))
    monkeypatch.setattr(planner_program, "MAX_GROUPS", 40)
    rough = solve(_program(jobs, (2.0, 3.0)))
    assert exact.value * (1 - 1e-4) <= rough.value <= exact.value * 1.03
    assert 40 < exact.value < 110


@pytest.mark.parametrize(
    "latency",
    [
        FAST,
        profile(4.0, 0.05, shape=SPARSE),
        profile(4.0, 0.05, overlap=0.3),
        profile(pp=2),
        profile(shape=SPARSE, dp=2),
    ],
)
def test_charges_never_exceed_what_steps_take(latency: object) -> None:
    """A step of any prompts and rows takes at least the charges of what is in it."""
    assert isinstance(latency, type(FAST))
    device = Device(latency, 1, 2048, 256, 10**9, True, True)
    draw = np.random.default_rng(5)
    for _ in range(80):
        rows, prompts = int(draw.integers(0, 200)), int(draw.integers(0, 3))
        held = draw.integers(1, 4000, rows).astype(float)
        cached, fresh = draw.integers(0, 2000, prompts).astype(float), draw.integers(2, 600, prompts).astype(float)
        if rows + prompts == 0:
            continue
        total = cached + fresh
        pairs = held.sum() + ((total * (total + 1) - cached * (cached + 1)) / 2).sum()
        step_s = latency.step_s(
            int(rows + fresh.sum()), int(held.sum() + total.sum()), rows + prompts, int(pairs)
        )  # fmt: skip
        ones = np.ones(prompts)
        prompt_sizes = Sizes(0 * ones, total, ones, fresh, total, ones, ones, ones)
        # an answer of two tokens is one charged step, with one token more than its prompt held
        row_sizes = Sizes(
            0 * held, held - 1, 2 + 0 * held, held - 1, 0 * held, 1 + 0 * held, np.full(rows, np.inf), 1 + 0 * held
        )  # fmt: skip
        for compute, paired in itertools.product((True, False), repeat=2):
            free = View(compute, paired, "pace")
            charged = prefill_s(device, free, prompt_sizes).sum() + decode_s(device, free, row_sizes).sum()
            assert charged <= step_s * (1 + 1e-9)
            tokens = View(compute, paired, "tokens")
            charged = prefill_s(device, tokens, prompt_sizes).sum() + decode_s(device, tokens, row_sizes).sum()
            assert charged <= step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "latency", [FAST, SLOW, profile(20.0, 0.02), profile(0.3, 1.0), profile(4.0, 0.05, shape=SPARSE)]
)
def test_steps_of_any_answers_last_as_long_as_their_paces_charge(latency: object) -> None:
    """Answers of all paces in whatever batches, each exactly as fast as its own TPOT: charges sum up to no more than
    the time that the steps took. This is point 3 of the proof."""
    assert isinstance(latency, type(FAST))
    device = Device(latency, 1, 2048, 256, 10**9, True, True)
    draw = np.random.default_rng(11)
    tightest = 0.0
    for _ in range(20):
        num, num_steps = int(draw.integers(1, 80)), int(draw.integers(2, 60))
        first = draw.integers(0, num_steps, num)
        last = first + 1 + (draw.random(num) * (num_steps - first)).astype(int).clip(0)
        prompt = draw.integers(1, 3000, num)
        inside = (first[:, None] <= np.arange(num_steps)) & (np.arange(num_steps) < last[:, None])
        held = np.where(inside, prompt[:, None] + 1 + np.arange(num_steps) - first[:, None], 0)
        step_s = np.array([
            latency.decode_step_s(int(rows), int(context)) if rows else 0.0
            for rows, context in zip(inside.sum(axis=0), held.sum(axis=0), strict=True)
        ])  # fmt: skip
        output = np.minimum(last, num_steps) - first + 1.0
        tpot_s = (inside * step_s).sum(axis=1) / (output - 1)
        ones = np.ones(num)
        sizes = Sizes(0 * ones, prompt * 1.0, output, ones, prompt * 1.0, ones, tpot_s * (1 + 1e-9), ones)
        for view in (one for one in VIEWS if one.spread == "pace"):
            charged = float(decode_s(device, view, sizes).sum())
            assert charged <= step_s.sum() * (1 + 1e-9)
            tightest = max(tightest, charged / float(step_s.sum()))
    assert tightest > 0.6, "the charges should be near what such batches take"
