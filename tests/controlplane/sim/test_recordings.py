"""Flight recordings become traces: what arrived when, how long, and which prompts begin alike."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from controlplane.core.config import CoreConfig
from controlplane.core.events import Arrived, Ended, Event, RequestSpec, Tick
from controlplane.history.recorder import FlightFiles
from controlplane.sim.recordings import Blocks, is_recording, read_recording
from transfer.api import Outcome
from transfer.errors import InvalidValue
from transfer.terms import SamplingParams, pack_tokens

CONFIG = CoreConfig()


def arrived(name: str, at: float, tokens: Iterable[int], **more: object) -> Arrived:
    values: dict[str, object] = {
        "request_id": name, "model": "m", "tokens": pack_tokens(list(tokens)), "arrived_s": at, "arrived_at": 1e9 + at,
        "sampling": SamplingParams(max_tokens=100), "traffic_class": "default", "timeout_s": 60.0,
    }  # fmt: skip
    return Arrived(request=RequestSpec(**(values | more)))  # type: ignore[arg-type]


def ended(name: str, outcome: Outcome, tokens: int) -> Ended:
    return Ended(
        request_id=name, outcome=outcome, finish_reason=None, output_tokens=tokens, ttft_s=None, tpot_s=None,
        e2e_s=1.0, max_itl_s=None,
    )  # fmt: skip


def record(directory: Path, events: Iterable[Event], epoch: int = 1, file_bytes: int = 1 << 20) -> None:
    files = FlightFiles(directory, CONFIG, epoch, 0, file_bytes=file_bytes, num_files=100)
    for number, event in enumerate(events):
        files.record(float(number), event)
    files.close()


def test_requests_of_a_recording_are_a_trace(tmp_path: Path) -> None:
    record(
        tmp_path,
        [
            arrived("a", 1.0, range(1200)), Tick(), arrived("b", 3.5, [*range(1024), 7, 7], tenant="t", priority=3),
            ended("b", "ok", 40), ended("a", "cancelled", 12), Tick(),
        ],
    )  # fmt: skip
    (file,) = tmp_path.iterdir()
    for path in (file, tmp_path):
        assert is_recording(path)
        requests, name, notes = read_recording(path)
        assert (name, notes) == ("recording", ())
        assert [(r.at_s, r.prompt_tokens, r.output_tokens) for r in requests] == [(0.0, 1200, 12), (2.5, 1026, 40)]
        assert (requests[1].tenant, requests[1].priority, requests[1].traffic_class) == ("t", 3, "default")
        first, second = (r.blocks for r in requests)
        assert (len(first), len(second)) == (3, 3)
        assert first[:2] == second[:2]
        assert first[2] != second[2]
    assert read_recording(file, 600).requests[0].blocks == (0, 1)


def test_files_of_several_lives_are_one_trace_in_order_of_time(tmp_path: Path) -> None:
    record(tmp_path, [arrived("c", 50.0, [1]), ended("c", "ok", 1)], epoch=1)
    events: list[Event] = []
    for number in range(40):
        events += [arrived(f"r{number}", float(number), range(300)), Tick(), ended(f"r{number}", "ok", 5), Tick()]
    record(tmp_path, events, epoch=9, file_bytes=4096)
    assert len(list(tmp_path.iterdir())) > 3
    requests = read_recording(tmp_path).requests
    assert [r.at_s for r in requests] == [*map(float, range(40)), 50.0]
    assert {r.blocks for r in requests[:40]} == {requests[0].blocks}


def test_what_never_ended_well_wants_the_median_of_its_class(tmp_path: Path) -> None:
    chat = {"traffic_class": "chat"}
    events = [arrived(name, float(place), [place], **chat) for place, name in enumerate("abcde")]
    short = arrived("s", 6.0, [1], sampling=SamplingParams(max_tokens=8), **chat)
    other = arrived("o", 7.0, [1])
    ends = [ended("a", "ok", 10), ended("b", "ok", 30), ended("c", "ok", 90), ended("d", "rejected", 0)]
    record(tmp_path, [*events, short, other, *ends, ended("s", "timed_out", 3), ended("o", "error", 0)])
    trace = read_recording(tmp_path)
    assert [r.output_tokens for r in trace.requests] == [10, 30, 90, 30, 30, 8, 100]
    assert str(trace.notes[0]).startswith("4 of 7 requests did not end well")


def test_a_number_stands_for_text_after_text_under_one_salt() -> None:
    blocks = Blocks(2)
    one, two = pack_tokens([1, 2, 3, 4]), pack_tokens([5, 6, 3, 4])
    assert blocks.ids(one, "") == blocks.ids(one, "") == (0, 1)
    assert not set(blocks.ids(two, "")) & {0, 1}
    assert not set(blocks.ids(one, "tenant")) & {0, 1, 2, 3}
    assert blocks.ids(pack_tokens([1, 2, 3]), "") == (0, 6)


def test_what_is_no_recording_is_a_sentence(tmp_path: Path) -> None:
    text = tmp_path / "trace.csv"
    text.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert not is_recording(text)
    assert not is_recording(tmp_path / "none")
    with pytest.raises(InvalidValue, match="not a flight recording"):
        read_recording(text)
    with pytest.raises(InvalidValue, match="no flight recording in"):
        read_recording(tmp_path)
    with pytest.raises(InvalidValue, match="cannot read the recording"):
        read_recording(tmp_path / "none")
    record(tmp_path / "empty", [Tick()])
    with pytest.raises(InvalidValue, match="holds no request"):
        read_recording(tmp_path / "empty")
