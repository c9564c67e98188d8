"""What is learned of an engine's speed from when its output comes."""

from __future__ import annotations

import pytest

from nodes.core.speed import SpeedMeter
from nodes.engines.served import Job, Output
from nodes.hardware import preset
from nodes.roles.served_times import JobTimes, Timed
from nodes.shapes import latency_profile, shape
from transfer.terms import SamplingParams

LATENCY = latency_profile(preset("H800"), shape("llama-3.1-8b"))


def job(num_tokens: int, num_loaded: int = 0, *, prefill: bool = False) -> Timed:
    sampling = None if prefill else SamplingParams(max_tokens=100)
    return Timed(Job("r", 1, [1] * num_tokens, 0, sampling, [], num_loaded, 0))


class Engine:
    """Tells JobTimes what happens, by a clock of its own, and keeps what the meter was told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.told: list[tuple[float, float]] = []
        meter = SpeedMeter()
        self.times = JobTimes(LATENCY, meter)
        meter.measured = lambda measured, predicted, now: self.told.append((measured, predicted))  # type: ignore[method-assign]

    def begin(self, *jobs: Timed) -> None:
        for one in jobs:
            self.times.began(one, self.now)

    def draw(self, after_s: float, *jobs: Timed, count: int = 1, cached: int | None = None) -> tuple[float, int]:
        self.now += after_s
        for one in jobs:
            self.times.drew(one, Output((7,) * count, cached_tokens=cached))
        return self.times.turn(self.now)


def test_a_step_is_the_time_between_outputs_of_those_who_generate() -> None:
    engine, jobs = Engine(), [job(100, 99), job(300, 299)]
    engine.begin(*jobs)
    assert engine.draw(0.5, *jobs) == (0.0, 0), "how long it waited for its first token is no step"
    assert engine.draw(0.02, *jobs)[0] == pytest.approx(0.02)
    assert engine.draw(0.06, *jobs, count=3)[0] == pytest.approx(0.02), "three tokens that came together"
    predicted = [LATENCY.decode_step_s(2, 400 + 2), LATENCY.decode_step_s(2, 400 + 4)]
    assert [told[1] for told in engine.told] == pytest.approx(predicted)
    engine.times.over(jobs[1], well=True)
    engine.draw(0.02, jobs[0])
    assert engine.told[-1][1] == pytest.approx(LATENCY.decode_step_s(1, 100 + 5))


def test_what_a_prompt_delays_says_nothing_of_decode() -> None:
    engine, decode, prompt = Engine(), job(100, 99), job(500)
    engine.begin(decode)
    engine.draw(0.02, decode)
    engine.begin(prompt)
    engine.draw(0.2, decode)
    assert engine.told == []
    step_s, num_prefill_tokens = engine.draw(0.1, decode, prompt)
    assert (step_s, num_prefill_tokens) == (pytest.approx(0.3), 500)
    pairs = 500 * 501 // 2 + 102
    assert engine.told == [(pytest.approx(0.3), pytest.approx(LATENCY.step_s(501, 602, 2, pairs)))]
    engine.draw(0.02, decode, prompt)
    assert engine.told[1:] == [(pytest.approx(0.02), pytest.approx(LATENCY.decode_step_s(2, 103 + 501)))]


def test_prompts_that_wait_for_each_other_are_counted_once() -> None:
    engine, first, second, third = Engine(), *(job(200, prefill=True) for _ in range(3))
    engine.begin(first, second, third)
    engine.now += 0.1
    engine.times.over(first, well=True)
    assert engine.times.turn(engine.now) == (pytest.approx(0.1), 200)
    engine.now += 0.3
    engine.times.over(second, well=True)
    engine.times.over(third, well=True)
    assert engine.times.turn(engine.now) == (pytest.approx(0.3), 400), "two in one go"
    assert [told[1] for told in engine.told] == pytest.approx(
        [LATENCY.prefill_s(200), LATENCY.step_s(400, 400, 2, 200 * 201)]
    )


def test_what_the_engine_was_spared_is_not_expected_of_it() -> None:
    engine, prompt, aborted = Engine(), job(200), job(300, prefill=True)
    engine.begin(prompt, aborted)
    engine.times.over(aborted, well=False)
    assert engine.draw(0.1, prompt, cached=160)[1] == 40
    assert engine.told == [(pytest.approx(0.1), pytest.approx(LATENCY.prefill_s(40, 160)))]
