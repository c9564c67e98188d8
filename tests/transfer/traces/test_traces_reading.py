"""Readers of traces on small files made here: recognised by content, wrong lines named, and the cut of a slice."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from transfer.errors import InvalidValue
from transfer.traces.cutting import cut
from transfer.traces.lines import write_trace
from transfer.traces.reading import FORMATS, read_trace, read_trace_file
from transfer.traces.request import TraceRequest

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.0000000,0,7
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
118.5,GPT-4,1360,276,1636,API log
"""
BURSTGPT_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
3.0,a-b,1.5,GPT-4,10.0,2.0,12,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]}

{"timestamp": 2500, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 9]}
"""
VLLM = {
    "backend": "vllm", "request_rate": 2.0, "burstiness": 1.0, "completed": 2, "input_lens": [100, 200, 300],
    "output_lens": [3, 0, 2], "ttfts": [0.1, 0.0, 0.2], "itls": [[0.05], [], [0.1]],
    "start_times": [10.0, 10.5, 11.5], "generated_texts": ["abc", "", "de"],
}  # fmt: skip


def write(tmp_path: Path, text: str | bytes) -> Path:
    """A name that says nothing of the format."""
    path = tmp_path / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def sizes(requests: list[TraceRequest]) -> list[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in requests]


def test_azure_rows_are_sorted_and_start_at_zero(tmp_path: Path) -> None:
    trace = read_trace_file(write(tmp_path, AZURE))
    assert (trace.format, trace.notes) == ("azure", ())
    assert sizes(trace.requests) == [(374, 44), (1, 7), (396, 109)]
    assert [request.at_s for request in trace.requests] == pytest.approx([0.0, 1.31941, 4.314579], abs=1e-5)


def test_azure_times_may_have_a_zone_and_without_one_no_summer_time(tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    zoned = "2024-05-10 00:00:00.5+00:00,1,1\n2024-05-10 02:00:01+02:00,1,1\n"
    assert [r.at_s for r in read_trace(write(tmp_path, head + zoned))] == pytest.approx([0.0, 0.5])
    over_night = "2023-10-29 00:30:00,1,1\n2023-10-29 03:30:00,1,1\n"
    assert read_trace(write(tmp_path, head + over_night))[1].at_s == 3 * 3600


def test_burstgpt_rows_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = read_trace_file(write(tmp_path, BURSTGPT))
    assert trace.format == "burstgpt"
    assert list(map(str, trace.notes)) == ["1 of 4 requests of the trace had failed and are left out"]
    assert sizes(trace.requests) == [(472, 18), (1087, 230), (1360, 276)]
    assert [request.at_s for request in trace.requests] == [0.0, 40.0, 113.5]
    assert sizes(read_trace(write(tmp_path, BURSTGPT_SESSIONS))) == [(10, 2)]


def test_mooncake_lines_share_blocks(tmp_path: Path) -> None:
    trace = read_trace_file(write(tmp_path, MOONCAKE))
    assert trace.format == "mooncake"
    assert [(r.at_s, r.blocks, r.block_tokens) for r in trace.requests] == [
        (0.0, (0, 1, 2), 512), (2.5, (0, 1, 9), 512),
    ]  # fmt: skip


def test_results_of_vllm_bench_are_traffic(tmp_path: Path) -> None:
    for text in (json.dumps(VLLM), json.dumps(VLLM, indent=2)):
        trace = read_trace_file(write(tmp_path, text))
        assert (trace.format, str(trace.notes[0])[:6]) == ("vllm", "1 of 3")
        assert [(r.at_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(0.0, 100, 3), (1.5, 300, 2)]


def test_appended_results_of_vllm_bench_follow_each_other(tmp_path: Path) -> None:
    two = "\n".join([json.dumps(VLLM), json.dumps(VLLM)])
    assert [request.at_s for request in read_trace(write(tmp_path, two))] == [0.0, 1.5, 1.5, 3.0]


def test_vllm_results_without_start_times_arrive_as_that_run_was_told_to(tmp_path: Path) -> None:
    many = {"input_lens": [10] * 2000, "output_lens": [1] * 2000, "burstiness": 4.0}
    requests = read_trace(write(tmp_path, json.dumps(many | {"request_rate": 5.0})))
    times = [request.at_s for request in requests]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean == pytest.approx(0.5, rel=0.1)
    assert {r.at_s for r in read_trace(write(tmp_path, json.dumps(many | {"request_rate": "inf"})))} == {0.0}


def test_our_own_lines_keep_every_field_through_a_file(tmp_path: Path) -> None:
    requests = [
        TraceRequest(at_s=0.0, prompt_tokens=3, output_tokens=2, traffic_class="chat", tenant="a", priority=2),
        TraceRequest(at_s=1.25, prompt_tokens=700, output_tokens=9, blocks=(4, 5), block_tokens=350),
    ]
    write_trace(requests, tmp_path / "own")
    assert read_trace_file(tmp_path / "own") == (requests, "phaseplane", ())
    short = read_trace(write(tmp_path, '{"at_s": 5, "prompt_tokens": 3, "output_tokens": 2}\n\n'))
    assert short == [TraceRequest(at_s=0.0, prompt_tokens=3, output_tokens=2)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "neither columns TIMESTAMP, .* nor Timestamp"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2 of .* Azure"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,2\n\n2023-11-16 18:15:47,1\n", "line 4 of"),
        ("Timestamp,Request tokens,Response tokens\n1,5,5\n2,-5,5\n", "line 3 of .* BurstGPT"),
        ("Timestamp,Request tokens,Response tokens\n1,5,5\nnan,5,5\n", "holds a time that is no number"),
        ("{}\n", "line 1 of .* neither timestamp"),
        ('{"timestamp": "x"}\n', "line 1 of .* Mooncake"),
        ('\n{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 1}\n', "line 3 of"),
        ('{"timestamp": 0, "input_length": -1, "output_length": 1}\n', "line 1 of"),
        ('{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1, "blocs": []}\n', "unknown field `blocs`"),
        ("{]\n", "line 1 of"),
        ('[{"conversations": []}]', "line 1 of"),
        ('{"input_lens": [1]}', "save it with --save-result --save-detailed"),
        ('{"input_lens": [1], "output_lens": [1, 2]}', "1 input_lens and 2 output_lens"),
        ('{"input_lens": [1], "output_lens": [1], "start_times": [1, 2]}', "2 start_times"),
        ('{"input_lens": [1], "output_lens": [1], "request_rate": "fast"}', "request_rate 'fast'"),
        ('{"input_lens": [1], "output_lens": [1]}\n{"input_lens": 3}\n', "line 2 of"),
        ("", "holds no request"),
        ("Timestamp,Request tokens,Response tokens\n1,5,0\n", "holds no request"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_bad_trace_names_the_place(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        read_trace(write(tmp_path, text))


def test_a_format_that_is_given_is_taken_at_its_word(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="has no column TIMESTAMP"):
        read_trace(write(tmp_path, BURSTGPT), "azure")
    with pytest.raises(InvalidValue, match="there is no trace format 'parquet'; use one of mooncake, azure"):
        read_trace(write(tmp_path, BURSTGPT), "parquet")
    with pytest.raises(InvalidValue, match="--trace FILE"):
        read_trace(tmp_path / "none")
    samples = (MOONCAKE, AZURE, BURSTGPT, json.dumps(VLLM), '{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1}')
    for name, text in zip(FORMATS, samples, strict=True):
        assert read_trace(write(tmp_path, text), name) == read_trace(write(tmp_path, text))


def test_a_cut_offers_exactly_the_rate_and_keeps_the_shape() -> None:
    requests = [TraceRequest(at_s=float(t), prompt_tokens=1, output_tokens=1) for t in (0, 10, 20, 21, 22, 40, 60)]
    part = cut(requests, rate=2.0, duration_s=2.0, start_s=10.0)
    assert [request.at_s for request in part] == pytest.approx([0.0, 1.25, 1.375, 1.5])
    assert (len(part) - 1) / part[-1].at_s == pytest.approx(2.0)
    assert [request.at_s for request in cut(requests, duration_s=15.0, start_s=10.0)] == [0.0, 10.0, 11.0, 12.0]
    assert [request.at_s for request in cut(requests, num=2, rate=math.inf)] == [0.0, 0.0]
    with pytest.raises(InvalidValue, match="--trace-start"):
        cut(requests, start_s=100.0)
    with pytest.raises(InvalidValue, match="after 25 s and before 30 s"):
        cut(requests, start_s=25.0, duration_s=5.0)
