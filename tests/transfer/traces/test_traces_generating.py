"""Generated traffic has the statistics its name says: rate, gaps, lengths, shared prefixes; it repeats by seed."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from transfer.errors import InvalidValue
from transfer.traces.arrivals import bursty_rates, poisson_times
from transfer.traces.generating import KINDS, generate, parse_traffic
from transfer.traces.loading import Wanted, load_trace
from transfer.traces.mixes import MIXES, SHARES, at_share, mean_tokens
from transfer.traces.reading import read_trace
from transfer.traces.request import TraceRequest

TRACE_VARIABLE = "PHASEPLANE_TEST_CONVERSATION_TRACE"


def made(text: str, seed: int = 1, duration_s: float | None = None) -> list[TraceRequest]:
    return generate(parse_traffic(f"generated:{text}"), seed, duration_s)


def gaps(requests: Sequence[TraceRequest]) -> list[float]:
    return [b.at_s - a.at_s for a, b in itertools.pairwise(requests)]


def cv(values: Sequence[float]) -> float:
    return statistics.pstdev(values) / statistics.fmean(values)


def prefix_share(requests: Sequence[TraceRequest]) -> float:
    """Of the blocks asked for, those that were there before at the same place, in a cache without end."""
    held: set[int] = set()
    found = 0
    for request in requests:
        found += sum(1 for _ in itertools.takewhile(held.__contains__, request.blocks))
        held.update(request.blocks)
    return found / sum(len(request.blocks) for request in requests)


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


@pytest.mark.parametrize("name", KINDS)
def test_equal_seeds_make_equal_traffic_in_order_of_time(name: str) -> None:
    some = made(f"{name}?num=200&rate=5")
    assert some == made(f"{name}?num=200&rate=5")
    assert some != made(f"{name}?num=200&rate=5", seed=2)
    assert len(some) == 200
    assert all(gap >= 0 for gap in gaps(some))
    assert all(r.at_s >= 0 and r.prompt_tokens >= 1 and r.output_tokens >= 1 for r in some)


@pytest.mark.parametrize(
    ("text", "tolerance"),
    [
        ("poisson?rate=5&num=4000", 0.05),
        ("gamma?rate=5&num=4000&cv=3", 0.15),
        ("bursty?rate=5&num=8000&period=10", 0.15),
        ("diurnal?rate=5&period=800", 0.05),
        ("agentic?rate=5&num=4000", 0.1),
        ("multiturn?rate=5&num=4000", 0.1),
        ("step?rate=5", 0.05),
        ("swing?rate=5", 0.05),
    ],
)
def test_the_mean_rate_is_the_one_asked_for(text: str, tolerance: float) -> None:
    some = made(text)
    assert len(some) / some[-1].at_s == pytest.approx(5.0, rel=tolerance)


@pytest.mark.parametrize("wanted", [0.0, 0.5, 1.0, 3.0])
def test_gaps_of_gamma_traffic_have_its_cv(wanted: float) -> None:
    assert cv(gaps(made(f"gamma?num=8000&cv={wanted}"))) == pytest.approx(wanted, rel=0.08, abs=1e-9)


def test_gaps_of_bursty_traffic_have_the_cv_of_its_process() -> None:
    burst, share, period = 20.0, 0.1, 10.0
    low, high = bursty_rates(5.0, burst, share)
    assert (high / low, share * high + (1 - share) * low) == pytest.approx((burst, 5.0))
    up, down = 1 / (period * (1 - share)), 1 / (period * share)
    spread = 2 * (high - low) ** 2 * up * down / ((up + down) ** 2 * (low * down + high * up + low * high))
    some = made(f"bursty?rate=5&num=20000&burst={burst}&share={share}&period={period}")
    assert cv(gaps(some)) == pytest.approx(math.sqrt(1 + spread), rel=0.12)


def test_a_burst_without_end_is_silent_between() -> None:
    some = made("bursty?rate=5&num=5000&burst=inf&share=0.2&period=10")
    in_silence = sum(gap for gap in gaps(some) if gap > 0.5)
    assert in_silence / some[-1].at_s == pytest.approx(0.8, abs=0.08)


def test_a_day_rises_and_falls_about_its_mean() -> None:
    some = made("diurnal?rate=5&period=4000&depth=0.8&noise=0")
    quarters = [0] * 4
    for request in some:
        quarters[int(request.at_s / 1000)] += 1
    high = 1 + 0.8 * 2 / math.pi
    assert [n / 5000 for n in quarters] == pytest.approx([high, high, 2 - high, 2 - high], rel=0.08)
    minutes = [0] * 1440
    for request in made("diurnal?rate=500&period=1440&depth=0&noise=0.3", duration_s=1440 / 10):
        minutes[int(request.at_s)] += 1
    assert cv(minutes[:144]) == pytest.approx(0.31, rel=0.2)
    assert some[-1].at_s < 4000


@pytest.mark.parametrize("name", [name for name in MIXES if name not in ("agent", "turns")])
def test_lengths_have_the_quantiles_of_their_mix(name: str) -> None:
    some = made(f"{name}?num=6000")
    for lengths, wanted in (
        ([r.prompt_tokens for r in some], MIXES[name].prompt),
        ([r.output_tokens for r in some], MIXES[name].output),
    ):
        assert statistics.fmean(lengths) == pytest.approx(mean_tokens(wanted), rel=0.07)
        for share in (0.1, 0.5, 0.9):
            near = [at_share(wanted, share + off) for off in (-0.02, 0.02)]
            assert near[0] <= quantile(lengths, share) <= near[1]
        assert list(wanted) == sorted(wanted)
        assert len(wanted) == len(SHARES)


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [("conversation", 1155, 211), ("code", 2048, 28), ("summarise", 8088, 229)],
)
def test_means_are_those_of_the_traffic_it_is_named_after(name: str, prompt: float, output: float) -> None:
    assert mean_tokens(MIXES[name].prompt) == pytest.approx(prompt, rel=0.05)
    assert mean_tokens(MIXES[name].output) == pytest.approx(output, rel=0.2)


@pytest.mark.parametrize(
    ("text", "prompt", "output", "shared"),
    [("agentic?num=12000&rate=6.6", 8596, 182, 0.59), ("multiturn?num=6000&rate=3.4", 12035, 343, 0.366)],
)
def test_sessions_are_as_in_mooncakes_traces(text: str, prompt: float, output: float, shared: float) -> None:
    some = made(text)
    assert statistics.fmean(r.prompt_tokens for r in some) == pytest.approx(prompt, rel=0.1)
    assert statistics.fmean(r.output_tokens for r in some) == pytest.approx(output, rel=0.1)
    assert prefix_share(some) == pytest.approx(shared, abs=0.04)
    assert all(len(r.blocks) == -(-r.prompt_tokens // 512) for r in some)


def test_a_block_is_always_found_after_the_same_blocks() -> None:
    before: dict[int, tuple[int, ...]] = {}
    for request in made("agentic?num=2000&apps=3"):
        for place, block in enumerate(request.blocks):
            assert before.setdefault(block, request.blocks[:place]) == request.blocks[:place]
    assert len({r.blocks[0] for r in made("agentic?num=300&apps=3&system=4000")}) == 3


def test_sessions_of_more_turns_share_more() -> None:
    few, many = (prefix_share(made(f"agentic?num=3000&turns={turns}")) for turns in (1, 6))
    assert many > few + 0.2


def test_a_step_goes_from_prefill_to_decode_and_a_swing_back_again() -> None:
    some = made("step?rate=20&at=100&mix=summarise&then=reasoning")
    assert some[-1].at_s == pytest.approx(200, abs=1)
    before, after = ([r for r in some if (r.at_s >= 100) is late] for late in (False, True))
    assert statistics.fmean(r.prompt_tokens for r in before) > 10 * statistics.fmean(r.prompt_tokens for r in after)
    assert statistics.fmean(r.output_tokens for r in after) > 10 * statistics.fmean(r.output_tokens for r in before)
    assert all((r.prompt_tokens > 800) for r in before)
    swinging = made("swing?rate=20&period=50", duration_s=200)
    means = [
        statistics.fmean(r.prompt_tokens for r in swinging if r.at_s // 50 == number) for number in range(4)
    ]  # fmt: skip
    assert min(means[0], means[2]) > 5 * max(means[1], means[3])


def test_times_do_not_depend_on_lengths() -> None:
    code, chat = made("poisson?mix=code&num=50"), made("poisson?num=50")
    assert [r.at_s for r in code] == [r.at_s for r in chat]
    assert made("code?num=50") == code


def test_poisson_times_have_the_rate_and_the_spread() -> None:
    times = poisson_times(10.0, 4000, 3)
    between = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.fmean(between) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(between) == pytest.approx(0.1, rel=0.1)
    assert poisson_times(float("inf"), 3, 0) == [0.0, 0.0, 0.0]


def test_the_command_line_wins_over_the_name() -> None:
    trace = load_trace("generated:poisson?rate=1&num=5", Wanted(rate=50.0, num=300, seed=4))
    assert (trace.format, len(trace.requests)) == ("generated", 300)
    assert 300 / trace.requests[-1].at_s == pytest.approx(50, rel=0.2)
    slice_of = load_trace("generated:poisson", Wanted(rate=50.0, duration_s=4.0, start_s=2.0)).requests
    whole = load_trace("generated:poisson", Wanted(rate=50.0, duration_s=6.0)).requests
    assert [r.prompt_tokens for r in slice_of] == [r.prompt_tokens for r in whole if r.at_s >= 2.0]
    assert slice_of[0].at_s == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("conversatio", "use --trace generated:conversation; known: poisson"),
        ("poisson?cv=2", "poisson traffic has no cv; it has rate, num, mix"),
        ("step?the=code", "it has rate, num, at, mix, then"),
        ("gamma?cv=-1", "cv must be a number above 0"),
        ("poisson?rate=inf", "rate must be a number above 0, got 'inf'"),
        ("poisson?num=1.5", "num must be a whole number"),
        ("poisson?mix=emails", "no mix of lengths 'emails'; use one of conversation, code"),
        ("bursty?share=1", "share must be below 1"),
        ("diurnal?depth=2", "depth is at most 1"),
        ("agentic?apps=0.5", "at least one app"),
        ("poisson?rate", "write it like generated:poisson"),
        ("diurnal?rate=1e9", "give a num"),
    ],
)
def test_traffic_that_cannot_be_is_a_sentence(text: str, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        made(text)
    with pytest.raises(InvalidValue, match="drop that"):
        load_trace("generated:poisson", Wanted(), "azure")


@pytest.mark.slow
@pytest.mark.skipif(TRACE_VARIABLE not in os.environ, reason=f"{TRACE_VARIABLE} names no trace")
def test_multiturn_traffic_has_the_quantiles_of_the_conversation_trace() -> None:
    real, ours = read_trace(Path(os.environ[TRACE_VARIABLE])), made("multiturn?num=12000&rate=3.4")
    for share in (0.05, 0.2, 0.5, 0.8, 0.9, 0.95):
        wanted = quantile([r.prompt_tokens for r in real], share)
        assert quantile([r.prompt_tokens for r in ours], share) == pytest.approx(wanted, rel=0.2)
    assert prefix_share(ours) == pytest.approx(prefix_share(real), abs=0.03)
