"""Parts of the simulator by themselves: links, runs of steps, chains of hashes, fleets in words."""

from __future__ import annotations

import random

import pytest
from sim_kit import node

from controlplane.sim.chain import Chain
from controlplane.sim.fleet import parse_fleet
from controlplane.sim.links import Links, Nic
from controlplane.sim.runs import Measured, Noise, Run, slope_of
from nodes.core.counted import CountedTokens
from nodes.core.events import StepPlan
from nodes.core.speed import ODD_RUN, SpeedMeter
from transfer.errors import InvalidValue
from transfer.terms import Role
from transfer.traces.request import TraceRequest

PLAN = StepPlan(chunks=[], pushes=[], started=[], num_prefill_tokens=0, preempted=[], arriving=[])


def test_transfers_that_share_an_end_wait_for_each_other_and_others_do_not() -> None:
    links = Links(1000.0)
    one, two, three, four = (Nic(name, name, 100.0) for name in ("a", "b", "c", "d"))
    assert links.book(one, two, 100.0, 0.0, 0.0) == 1.0
    assert links.book(one, three, 100.0, 0.0, 0.0) == 2.0  # what a sends
    assert links.book(four, two, 100.0, 0.0, 0.0) == 2.0  # what b receives
    assert links.book(two, four, 100.0, 0.0, 0.0) == 1.0  # the other directions are free
    assert links.seconds(one, Nic("e", "e", 10.0), 100.0) == 10.0


def test_layers_hide_under_compute_but_for_the_last() -> None:
    links = Links(1000.0)
    one, two = Nic("a", "a", 100.0), Nic("b", "b", 100.0)
    assert links.book(one, two, 100.0, since=0.0, now=5.0, num_layers=10) == pytest.approx(5.1)
    assert links.book(one, two, 1000.0, since=5.0, now=6.0, num_layers=10) == pytest.approx(15.0)


def test_one_host_moves_kv_at_its_own_speed_and_past_the_nic() -> None:
    links = Links(1000.0)
    one, two, far = Nic("a", "h", 100.0), Nic("b", "h", 100.0), Nic("c", "c", 100.0)
    assert links.book(one, two, 1000.0, 0.0, 0.0) == 1.0
    assert links.book(one, far, 100.0, 0.0, 0.0) == 1.0


@pytest.mark.parametrize("noisy", [False, True])
def test_a_run_knows_when_each_of_its_steps_ends(noisy: bool) -> None:
    run, count = Run(PLAN, 10.0, 0.03, 1.5, 8), 200
    noise = Noise(0.1, (1, 2, 3)).factors(0, count) if noisy else None
    run.stretch(count, 0.00002, noise)
    end = 10.0
    for step in range(count):
        end += run.duration_s(step)
        assert run.end_s(step + 1) == pytest.approx(end, rel=1e-12)
        if step < count - 1:
            assert run.num_ended(run.end_s(step + 1) + 1e-9) == step + 1
            assert run.num_ended(run.end_s(step + 1) - 1e-9) == step
    assert run.num_ended(1e9) == count - 1  # the last one ends by an event of its own
    assert run.longest_s(0, count) == max(run.duration_s(step) for step in range(count))


def test_noise_is_the_same_however_steps_are_taken_together() -> None:
    together, alone = Noise(0.2, (5,)), Noise(0.2, (5,))
    whole = together.factors(0, 10_000)
    assert [alone.factors(step, 1)[0] for step in range(10_000)] == whole
    assert 0.15 < sum((one - 1.0) ** 2 for one in whole) ** 0.5 / 100 < 0.25


@pytest.mark.parametrize("seed", range(20))
def test_what_is_measured_of_runs_is_what_a_node_measures_of_each_step(seed: int) -> None:
    """Odd ones (8 times as long), idle gaps, noise, waits for KV, a change of role; and however often it is looked."""
    rng, measured, meter = random.Random(seed), Measured(), SpeedMeter()
    noise, num_steps, start_s, factor = Noise(0.1, (seed,)), 0, 0.0, 1.0
    for _ in range(40):
        factor = rng.choice([factor, factor, factor, 0.5, 1.0, 1.4, 3.0, 8.0])
        count, first_s, slope_s = rng.choice([1, 2, 5, rng.randrange(1, 120)]), rng.choice([0.01, 0.3]), 1e-5
        run = Run(PLAN, start_s, first_s, factor, 4)
        run.stretch(count, slope_s, noise.factors(num_steps, count) if rng.random() < 0.3 else None)
        waited_s = rng.choice([0.0, 0.5]) if count == 1 else 0.0
        for upto in sorted([*(rng.randrange(count) for _ in range(rng.randrange(3))), count]):
            measured.take(run, upto, waited_s)
        for step in range(count):
            ended_s = run.end_s(step + 1) + waited_s
            meter.measured(run.duration_s(step), first_s + step * slope_s, ended_s)
        num_steps, start_s = num_steps + count, ended_s + rng.choice([0.0, 0.0, 1.0, 30.0])
        assert measured.step_s == pytest.approx(meter.step_s, rel=1e-11)
        for now in (ended_s, start_s, ended_s + 5.0, ended_s + 1e4):
            assert measured.speed(now) == pytest.approx(meter.speed(now), rel=1e-11)
        if rng.random() < 0.05:
            measured.restart()
            meter.restart()


def test_a_straggler_is_found_out_and_forgotten_as_a_node_does() -> None:
    measured, start_s, told = Measured(), 0.0, []
    few = ((1.0, 200), (8.0, ODD_RUN - 1))
    for factor, count in (*few, *few, (8.0, 1), (8.0, 300), (1.0, 500)):
        run = Run(PLAN, start_s, 0.01, factor, 4)
        run.stretch(count, 0.0, None)
        measured.take(run, count)
        start_s = run.end_s(count)
        told.append(measured.speed(start_s))
    assert told[:4] == [1.0] * 4, "steps as predicted leave no trace, and a few that stood still are not believed"
    assert told[4:] == pytest.approx([1.7, 8.0, 1.0], rel=1e-9)


def test_a_slope_that_changes_within_a_run_is_found() -> None:
    profile = node("d0").latency
    assert profile is not None
    first_s = profile.step_s(4, 1000, 4)
    slope_s = slope_of(profile, 4, 1000, first_s, 100)
    assert slope_s is not None
    assert first_s + 99 * slope_s == pytest.approx(profile.step_s(4, 1396, 4), rel=1e-12)

    class Bent:
        def step_s(self, num_new: int, context: int, batch: int) -> float:
            return max(1.0, context / 1200)

    assert slope_of(Bent(), 4, 1000, 1.0, 100) is None  # type: ignore[arg-type]


def test_equal_ids_after_equal_ids_are_equal_blocks() -> None:
    chain = Chain(128)

    def hashes(name: str, prompt: int, *blocks: int) -> list[bytes]:
        made = TraceRequest(at_s=0.0, prompt_tokens=prompt, output_tokens=1, blocks=blocks, block_tokens=512)
        return [key.digest for key in chain.keys(name, made)]

    one, two = hashes("a", 1500, 1, 2, 3), hashes("b", 1300, 1, 2, 9)
    assert len(one) == 11
    assert len(two) == 10
    assert one[:8] == two[:8]
    assert one[8:10] != two[8:10]
    assert hashes("c", 1500, 2, 1, 3)[4:8] != one[:4]  # the same id elsewhere is other text
    assert hashes("d", 1500, 1)[:4] == one[:4]
    assert hashes("d", 1500, 1)[4:] != hashes("e", 1500, 1)[4:]
    assert len({*one, *two}) == 13


def test_counted_tokens_are_as_long_as_they_say() -> None:
    tokens = CountedTokens(5)
    tokens.append(7)
    assert (len(tokens), len(tokens[2:]), len(tokens[-1:]), tokens[5], bool(CountedTokens(0))) == (6, 4, 1, 0, False)
    assert tokens == CountedTokens(6)
    assert tokens != CountedTokens(5)
    assert tokens.copy() is not tokens
    with pytest.raises(IndexError):
        tokens[6]


def test_a_fleet_in_words() -> None:
    nodes = parse_fleet(
        "2xH800:prefill, 3xh20:decode,1xH20@8:decode,1xL40S@16:mixed,2xCPU:kv_pool+2TB", "llama-3-70b", 512
    )
    assert [one.id for one in nodes] == ["p0", "p1", "d0", "d1", "d2", "d3", "m0", "k0", "k1"]
    assert [one.num_gpus for one in nodes] == [4, 4, 4, 4, 4, 8, 16, 0, 0]
    assert [one.role for one in nodes[-3:]] == [Role.MIXED, Role.KV_POOL, Role.KV_POOL]
    assert nodes[0].price_per_hour == 8.0
    assert nodes[0].link_bytes_per_s == 4 * 400e9 / 8
    block_bytes = 2 * 80 * 8 * 128 * 2 * 512
    assert nodes[0].num_blocks * block_bytes >= 0.3 * 4 * 80e9
    assert nodes[-1].num_blocks == int(0.8e12 // block_bytes)
    assert nodes[-1].ssd_blocks == int(2e12 // block_bytes)
    assert parse_fleet("1xH800:mixed", "llama-3.1-8b", 16)[0].num_gpus == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8H800:prefill", "write COUNTxCLASS"), ("8xH900:prefill", "did you mean"), ("8xH800:cook", "not 'cook'"),
        ("0xH800:prefill", "from 1 to"), ("2xCPU@2:kv_pool", "no GPUs"), ("1xH800+2TB:prefill", "write COUNTxCLASS"),
        ("1xH800:prefill+2TB", "only a kv_pool"), ("1xH800@1:prefill", "like @2"),
    ],
)  # fmt: skip
def test_what_is_no_fleet_is_said_with_how_to_write_it(text: str, says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        parse_fleet(text, "llama-3-70b", 512)


def test_a_model_too_large_for_a_class_is_said() -> None:
    with pytest.raises(InvalidValue, match="no useful room for KV on up to 16 L40S"):
        parse_fleet("1xL40S:decode", "deepseek-v3", 64)
