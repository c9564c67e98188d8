"""The flight recorder's codec: torn ends, foreign bytes, any chunking, every kind of event."""

from __future__ import annotations

import pytest
from core_kit import Rig, config, ended, hello, spec

from controlplane.core.events import (
    ApplyWanted,
    Arrived,
    ClassesRestored,
    ClassesState,
    ClassesWanted,
    Event,
    FirstToken,
    FromNode,
    HoldWanted,
    NodeLost,
    PlanWanted,
    Resume,
    Tick,
)
from controlplane.core.recorder import FlightRecorder, effects_digest, read, replay
from transfer.api import ApplyRequest, PlanRequest
from transfer.classes import ClassesRequest
from transfer.errors import InvalidValue
from transfer.terms import Role, Slo

EVENTS: list[Event] = [
    FromNode(instance_id="m0", message=hello("m0", Role.MIXED)),
    Arrived(request=spec("r1")),
    FirstToken(request_id="r1"),
    ended("r1"),
    NodeLost(instance_id="m0"),
    Resume(request_id="r1", tokens=b"", num_output=0),
    PlanWanted(ask_id="a", request=PlanRequest(xpyd="1P2D")),
    ApplyWanted(ask_id="b", plan_id="x", apply=ApplyRequest(base_version=1)),
    HoldWanted(ask_id="c", instance_id="m0", action="cordon", apply=ApplyRequest(base_version=1)),
    ClassesWanted(ask_id="d", change=ClassesRequest(base_version=1, classes={"batch": Slo(1.0, 0.1)})),
    ClassesRestored(state=ClassesState(classes={"batch": None}, configured={"batch": None})),
    Tick(),
]


def recording() -> bytes:
    recorder = FlightRecorder(config(lease_s=4.0), 7, 3)
    return recorder.header() + b"".join(recorder.entry(index * 0.5, event) for index, event in enumerate(EVENTS))


@pytest.mark.parametrize("size", [1, 7, 1000, 10**6])
def test_chunks_of_any_size_give_the_same_events(size: int) -> None:
    data = recording()
    header, entries = read(data[start : start + size] for start in range(0, len(data), size))
    assert (header.control_epoch, header.seed, header.config.lease_s) == (7, 3, 4.0)
    found = list(entries)
    assert [one.event for one in found] == EVENTS
    assert [one.now for one in found] == [index * 0.5 for index in range(len(EVENTS))]


def test_a_torn_end_ends_quietly() -> None:
    data = recording()
    _, entries = read([data[:-3]])
    assert [one.event for one in entries] == EVENTS[:-1]


def test_foreign_bytes_are_refused_with_a_sentence() -> None:
    for data in (b"", b"\x04\x00\x00\x00abcd", b"\xff\xff\xff\xff", recording()[300:]):
        with pytest.raises(InvalidValue, match="not a flight recording"):
            read([data])
    header = FlightRecorder(config(), 1, 1).header()
    _, entries = read([header + b"\x02\x00\x00\x00\x92\x01"])
    with pytest.raises(InvalidValue, match="does not know"):
        list(entries)


def test_a_replay_begins_with_the_first_part() -> None:
    recorder = FlightRecorder(config(), 1, 1)
    with pytest.raises(InvalidValue, match="part 2"):
        list(replay([recorder.header(part=2), recorder.entry(0.0, Tick())]))


def test_a_replay_decides_as_it_was_decided() -> None:
    rig, recorder = Rig(), FlightRecorder(config(), 7, 0)
    data, digests = [recorder.header()], []
    for index, event in enumerate(EVENTS):
        data.append(recorder.entry(float(index), event))
        digests.append(effects_digest(rig.core.handle(event, float(index))))
    assert [one.digest for one in replay(data)] == digests
    assert len(set(digests)) > 3
