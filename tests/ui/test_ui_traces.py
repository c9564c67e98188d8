"""Readers of recorded traffic on small files made here, the cut of a slice, and the generator's statistics."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest

from ui.errors import CliError
from ui.traces import MIXES, Call, cut_trace, generate, load_trace, poisson_times
from ui.workload import Job, Load, PromptMaker, make_jobs

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.0000000,0,7
"""


def load(**changes: object) -> Load:
    values: dict[str, object] = {
        "rate": None, "num": None, "duration_s": None, "prompt_tokens": (8, 8), "output_tokens": (4, 4),
    }  # fmt: skip
    return Load(**(values | changes))  # type: ignore[arg-type]


def test_azure_rows_are_sorted_and_start_at_zero(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    calls = load_trace(str(path), None, None, 0)
    assert [(call.prompt_tokens, call.output_tokens) for call in calls] == [(374, 44), (1, 7), (396, 109)]
    assert [call.at_s for call in calls] == pytest.approx([0.0, 1.31941, 4.314579], abs=1e-5)


def test_mooncake_lines_share_blocks(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 2500, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 9]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    calls = load_trace(str(path), None, None, 0)
    assert [call.at_s for call in calls] == [0.0, 2.5]
    maker = PromptMaker(range(100), 0)
    first, second = (maker.tokens(Job(i, 0.0, call, 1)) for i, call in enumerate(calls))
    assert (len(first), len(second)) == (1500, 1030)
    assert first[:1024] == second[:1024]
    assert first[1024:1030] != second[1024:1030]


def test_our_own_lines(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"at_s": 5, "prompt_tokens": 3, "output_tokens": 2, "traffic_class": "chat"}\n\n')
    assert load_trace(str(path), None, None, 0) == [Call(0.0, 3, 2, traffic_class="chat")]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "a,b\n1,2\n", "has no columns TIMESTAMP"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2"),
        ("a.jsonl", "{}\n", "line 1"),
        ("a.jsonl", '{"timestamp": "x"}\n', "line 1"),
        ("a.jsonl", "", "holds no request"),
        ("a.jsonl", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_bad_trace_names_the_place(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CliError, match=said):
        load_trace(str(path), None, None, 0)


def test_a_missing_trace_and_an_unknown_mix_name_the_way_out(tmp_path):
    with pytest.raises(CliError, match="--trace FILE"):
        load_trace(str(tmp_path / "nope.csv"), None, None, 0)
    with pytest.raises(CliError, match="generated:conversation"):
        load_trace("generated:nope", None, None, 0)


def test_a_cut_offers_exactly_the_rate_and_keeps_the_shape():
    calls = [Call(float(t), 1, 1) for t in (0, 10, 20, 21, 22, 40, 60)]
    part = cut_trace(calls, rate=2.0, num=None, duration_s=2.0, start_s=10.0)
    assert [call.at_s for call in part] == pytest.approx([0.0, 1.25, 1.375, 1.5])
    assert (len(part) - 1) / part[-1].at_s == pytest.approx(2.0)
    part = cut_trace(calls, rate=None, num=None, duration_s=15.0, start_s=10.0)
    assert [call.at_s for call in part] == [0.0, 10.0, 11.0, 12.0]
    with pytest.raises(CliError, match="--trace-start"):
        cut_trace(calls, None, None, None, 100.0)


def test_generated_traffic_is_like_the_recorded_and_repeats():
    calls = generate(MIXES["conversation"], 5.0, 8000, seed=1)
    assert calls == generate(MIXES["conversation"], 5.0, 8000, seed=1)
    assert calls != generate(MIXES["conversation"], 5.0, 8000, seed=2)
    assert statistics.median(call.prompt_tokens for call in calls) == pytest.approx(1020, rel=0.1)
    assert statistics.mean(call.prompt_tokens for call in calls) == pytest.approx(1155, rel=0.1)
    assert statistics.mean(call.output_tokens for call in calls) == pytest.approx(211, rel=0.1)
    assert 8000 / calls[-1].at_s == pytest.approx(5.0, rel=0.1)


def test_poisson_times_have_the_rate_and_the_spread():
    times = poisson_times(10.0, 4000, 3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.1)
    assert poisson_times(float("inf"), 3, 0) == [0.0, 0.0, 0.0]


def test_duration_bounds_the_arrivals():
    jobs, _ = make_jobs(load(rate=50.0, duration_s=2.0), None)
    assert all(job.at_s <= 2.0 for job in jobs)
    assert len(jobs) == pytest.approx(100, rel=0.4)
    assert len(make_jobs(load(), None)[0]) == 100


def test_the_mix_of_classes_is_kept():
    jobs, _ = make_jobs(load(num=1000, classes=(("chat", 3.0), ("batch", 1.0))), None)
    assert sum(job.traffic_class == "chat" for job in jobs) == pytest.approx(750, rel=0.1)
