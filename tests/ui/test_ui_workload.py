"""What a benchmark sends of a trace: shared blocks become shared tokens, a duration bounds arrivals."""

from __future__ import annotations

import json

import pytest

from ui.errors import CliError
from ui.workload import Job, Load, PromptMaker, make_jobs


def load(**changes: object) -> Load:
    values: dict[str, object] = {
        "rate": None, "num": None, "duration_s": None, "prompt_tokens": (8, 8), "output_tokens": (4, 4),
    }  # fmt: skip
    return Load(**(values | changes))  # type: ignore[arg-type]


def test_equal_blocks_become_equal_tokens(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 2500, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 9]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    jobs, num_shortened = make_jobs(load(trace=str(path)), None)
    assert [(job.at_s, job.max_tokens) for job in jobs] == [(0.0, 5), (2.5, 6)]
    assert num_shortened == 0
    maker = PromptMaker(range(100), 0)
    first, second = (maker.tokens(job) for job in jobs)
    assert (len(first), len(second)) == (1500, 1030)
    assert first[:1024] == second[:1024]
    assert first[1024:1030] != second[1024:1030]
    jobs, num_shortened = make_jobs(load(trace=str(path)), 1200)
    assert num_shortened == 1
    assert [len(maker.tokens(job)) for job in jobs] == [1195, 1030]


def test_generated_traffic_takes_the_rate_and_the_number_of_the_command_line():
    jobs, _ = make_jobs(load(trace="generated:conversation?rate=1&num=5", rate=10.0, num=2000), None)
    assert len(jobs) == 2000
    assert 2000 / jobs[-1].at_s == pytest.approx(10.0, rel=0.1)
    jobs, _ = make_jobs(load(trace="generated:bursty", rate=float("inf"), num=3), None)
    assert [job.at_s for job in jobs] == [0.0, 0.0, 0.0]


def test_a_trace_that_cannot_be_is_the_sentence_as_it_is(tmp_path):
    with pytest.raises(CliError, match="give a file with --trace FILE"):
        make_jobs(load(trace=str(tmp_path / "nope.csv")), None)
    with pytest.raises(CliError, match="use --trace generated:conversation"):
        make_jobs(load(trace="generated:conversatio"), None)


def test_duration_bounds_the_arrivals():
    jobs, _ = make_jobs(load(rate=50.0, duration_s=2.0), None)
    assert all(job.at_s <= 2.0 for job in jobs)
    assert len(jobs) == pytest.approx(100, rel=0.4)
    assert len(make_jobs(load(), None)[0]) == 100


def test_the_mix_of_classes_is_kept():
    jobs, _ = make_jobs(load(num=1000, classes=(("chat", 3.0), ("batch", 1.0))), None)
    assert sum(job.traffic_class == "chat" for job in jobs) == pytest.approx(750, rel=0.1)


def test_a_prompt_is_the_same_for_the_same_job():
    job = Job(3, 0.0, make_jobs(load(num=1), None)[0][0].prompt, 4)
    assert PromptMaker(range(50), 7).tokens(job) == PromptMaker(range(50), 7).tokens(job)
    assert PromptMaker(range(50), 7).tokens(job) != PromptMaker(range(50), 8).tokens(job)
