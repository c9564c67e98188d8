"""Section: what the simulator predicts of a fleet that was recorded, beside what its clients measured.

Reads a flight recording: the instances as they declared themselves, the requests as they came, and how each ended. The
first quarter of the requests tells how instances' steps compared with their profiles, as the scheduler learns it while
it serves; errors are of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from controlplane.core.config import CoreConfig
from controlplane.core.events import Arrived, Ended, FromNode
from controlplane.core.recorder import read
from controlplane.history.recorder import chunks
from controlplane.sim.driver import simulate
from controlplane.sim.recordings import read_recording
from controlplane.sim.spec import NodeSpec, SimConfig
from controlplane.validation.section import Section, percent
from controlplane.validation.simulated import quantile
from transfer.api import RequestRecord
from transfer.errors import InvalidValue
from transfer.terms import Role
from transfer.wire.messages import Heartbeat, Hello, Reserved

TITLE = "A fleet recorded here"
BAR = 0.10
SHARES = (0.5, 0.9)
NAMES = tuple(f"{name} p{100 * share:.0f}" for name in ("TTFT", "TPOT") for share in SHARES)
MIN_ENDED = 20
LEARNED = 0.25
"""Part of the requests, the first ones, during which instances' own correction of their step times is heard."""
ANSWER_SHARE = 0.25
"""Slower answers waited in the line for a place, which is simulated."""


class Recorded(NamedTuple):
    """One recording: how its core was set up, who declared themselves, and what requests that ended well took.

    arrived: when each request came, in their order. answer_s: of requests, from arrival until their instance had
    answered the first message about them. speeds: (when, measured over predicted step time), as each instance told it
    while it ran something.
    """

    config: CoreConfig
    hellos: dict[str, Hello]
    arrived: dict[str, float]
    ended: dict[str, Ended]
    answer_s: list[float]
    speeds: dict[str, list[tuple[float, float]]]

    @property
    def judged(self) -> list[str]:
        """Requests that errors are of, by arrival."""
        return list(self.arrived)[int(LEARNED * len(self.arrived)) :]

    @property
    def ends(self) -> list[Ended]:
        """Of those that ended."""
        return [self.ended[name] for name in self.judged if name in self.ended]

    def speed(self, instance_id: str) -> float:
        """How many times as long as predicted its steps took while the first requests came; 1.0 where it ran none."""
        until = self.arrived[self.judged[0]]
        told = [speed for at, speed in self.speeds.get(instance_id, []) if at < until]
        return quantile(told, 0.5) if told else 1.0

    @property
    def control_s(self) -> float:
        """What a request costs beside steps and waiting: its way to an instance and the first token's way back, as the
        quicker of the recorded answers took. The simulator's messages take no time."""
        return quantile(self.answer_s, ANSWER_SHARE) if self.answer_s else 0.0


def recorded_fleet(recording: Path | None) -> Section:
    """TTFT and TPOT, p50 and p90, predicted within 10 %. Raises InvalidValue for what is no recording, and OSError."""
    if recording is None:
        return Section(
            TITLE,
            "Skipped: no recording was given. Start `phaseplane up --state DIR`, run `phaseplane bench` against it, "
            "and name the flight-*.msgpack below DIR with --recording.",
        )
    found = _read(recording)
    trace = read_recording(recording)
    layout = next((one.layout for one in found.hellos.values() if one.layout is not None), None)
    declared = [_node(hello) for hello in found.hellos.values()]
    provenances = sorted({one.latency.provenance for one in declared if one.latency is not None})
    if layout is None or not provenances:
        raise InvalidValue(f"no engine declares itself in {recording}; give the first file (part 000000) of the fleet")
    speeds = {one.id: found.speed(one.id) for one in declared if one.latency is not None}
    nodes = [
        one if one.latency is None else replace(one, latency=one.latency.scaled(speeds[one.id])) for one in declared
    ]
    config = SimConfig(
        core=replace(found.config, autopilot="off"), model="recorded", token_bytes=float(layout.token_bytes),
        block_size=layout.block_size, layout=layout,
    )  # fmt: skip
    measured = _quantiles(found.ends)
    predicted, alone = (
        _quantiles(_judged(simulate(fleet, trace.requests, config).records, found), found.control_s)
        for fleet in (nodes, declared)
    )
    errors = [abs(ours / real - 1.0) for real, ours in zip(measured, predicted, strict=True)]
    rows = [
        (name, f"{1e3 * real:.1f}", f"{1e3 * ours:.1f}", percent(error), f"{1e3 * plain:.1f}")
        for name, real, ours, error, plain in zip(NAMES, measured, predicted, errors, alone, strict=True)
    ]
    return Section(
        title=TITLE,
        verdict=f"TTFT and TPOT, p50 and p90, are predicted {percent(min(errors))} to {percent(max(errors))} off; the "
        f"bar is {percent(BAR, 0)} each.",
        table=[("", "measured ms", "predicted ms", "error", "by the profile alone, ms"), *rows],
        notes=[
            f"{len(found.judged)} requests, the last of {len(trace.requests)}, on "
            f"{', '.join(f'{one.role} ({one.hardware})' for one in nodes)}; step times by the profiles the instances "
            f"declared ({', '.join(provenances)}), times what they measured while the first requests came: "
            f"{', '.join(f'{one:.2f}' for one in speeds.values())}.",
            f"Predicted TTFT has {1e3 * found.control_s:.1f} ms for messages, as the quicker answers of instances "
            "took.",
        ],
        passed=max(errors) <= BAR,
        figures=tuple((f"{name.replace(' ', '_')}_error", error) for name, error in zip(NAMES, errors, strict=True)),
    )


def _judged(records: Iterable[RequestRecord], found: Recorded) -> list[RequestRecord]:
    """Of simulated requests, which are numbered, those that errors are of."""
    first = len(found.arrived) - len(found.judged)
    return [one for one in records if int(one.request_id[1:]) >= first]


def _quantiles(ended: Sequence[Ended | RequestRecord], control_s: float = 0.0) -> list[float]:
    """As NAMES says, of those that ended well; control_s is added to each TTFT."""
    well = [one for one in ended if one.outcome == "ok"]
    ttft = [one.ttft_s + control_s for one in well if one.ttft_s is not None]
    tpot = [one.tpot_s for one in well if one.tpot_s is not None]
    return [quantile(times, share) for times in (ttft, tpot) for share in SHARES]


def _read(recording: Path) -> Recorded:
    header, entries = read(chunks(recording))
    found, waiting = Recorded(header.config, {}, {}, {}, [], {}), dict[str, float]()
    for entry in entries:
        event = entry.event
        if isinstance(event, FromNode):
            _heard(found, waiting, event, entry.now)
        elif isinstance(event, Arrived):
            one = event.request
            found.arrived[one.request_id] = waiting[one.request_id] = one.arrived_s
        elif isinstance(event, Ended):
            found.ended[event.request_id] = event
    num = sum(one.outcome == "ok" and one.tpot_s is not None for one in found.ends)
    if num < MIN_ENDED:
        raise InvalidValue(
            f"{num} requests of several tokens ended well in {recording} after its first quarter; record at least "
            f"{MIN_ENDED}"
        )
    return found


def _heard(found: Recorded, waiting: dict[str, float], event: FromNode, now: float) -> None:
    message = event.message
    if isinstance(message, Hello):
        found.hellos[event.instance_id] = message
    elif isinstance(message, Reserved) and message.request_id in waiting:
        found.answer_s.append(now - waiting.pop(message.request_id))
    elif isinstance(message, Heartbeat) and message.load.num_running:
        found.speeds.setdefault(event.instance_id, []).append((now, message.load.speed))


def _node(hello: Hello) -> NodeSpec:
    hardware = hello.hardware
    return NodeSpec(
        id=hello.instance_id, role=hello.role, hardware=hardware.name, num_gpus=hardware.num_gpus,
        price_per_hour=hardware.price_per_hour, latency=None if hello.role is Role.KV_POOL else hello.latency,
        link_bytes_per_s=hardware.link_bytes_per_s, num_blocks=hello.num_blocks, token_budget=hello.token_budget,
        host=hello.host_id,
    )  # fmt: skip
