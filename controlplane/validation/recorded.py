"""Section: what the simulator predicts of a fleet that was recorded, beside what its clients measured.

Reads a flight recording: the instances as they declared themselves, the requests as they came, and how each ended.
"""

from __future__ import annotations

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
from transfer.errors import InvalidValue
from transfer.terms import Role
from transfer.wire.messages import Heartbeat, Hello, Reserved

TITLE = "A fleet recorded here"
BAR = 0.10
SHARES = (0.5, 0.9)
MIN_ENDED = 20
ANSWER_SHARE = 0.25
"""Slower answers waited in the line for a place, which is simulated."""


class Recorded(NamedTuple):
    """One recording: how its core was set up, who declared themselves, and what requests that ended well took.

    answer_s: of requests, from arrival until their instance had answered the first message about them.
    speeds: measured over predicted step time, as instances told it while they ran something.
    """

    config: CoreConfig
    hellos: dict[str, Hello]
    ttft_s: list[float]
    tpot_s: list[float]
    answer_s: list[float]
    speeds: list[float]

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
    nodes = [_node(hello) for hello in found.hellos.values()]
    layout = next((one.layout for one in found.hellos.values() if one.layout is not None), None)
    latencies = [one.latency for one in nodes if one.latency is not None]
    if layout is None or not latencies:
        raise InvalidValue(f"no engine declares itself in {recording}; give the first file (part 000000) of the fleet")
    config = SimConfig(
        core=replace(found.config, autopilot="off"), model="recorded", token_bytes=float(layout.token_bytes),
        block_size=layout.block_size, layout=layout,
    )  # fmt: skip
    records = simulate(nodes, trace.requests, config).records
    ttft = [one.ttft_s + found.control_s for one in records if one.ttft_s is not None]
    tpot = [one.tpot_s for one in records if one.tpot_s is not None]
    provenances = sorted({one.provenance for one in latencies})
    rows, errors = [], []
    for name, measured, predicted in (("TTFT", found.ttft_s, ttft), ("TPOT", found.tpot_s, tpot)):
        for share in SHARES:
            real, ours = quantile(measured, share), quantile(predicted, share)
            errors.append(abs(ours / real - 1.0))
            rows.append((f"{name} p{100 * share:.0f}", f"{1e3 * real:.1f}", f"{1e3 * ours:.1f}", percent(errors[-1])))
    return Section(
        title=TITLE,
        verdict=f"TTFT and TPOT, p50 and p90, are predicted {percent(min(errors))} to {percent(max(errors))} off; the "
        f"bar is {percent(BAR, 0)} each.",
        table=[("", "measured ms", "predicted ms", "error"), *rows],
        notes=[
            f"{len(trace.requests)} requests on {', '.join(f'{one.role} ({one.hardware})' for one in nodes)}; step "
            f"times by the profiles the instances declared ({', '.join(provenances)}).",
            f"Predicted TTFT has {1e3 * found.control_s:.1f} ms for messages, as the quicker answers of instances took."
            + (
                f" Steps took {quantile(found.speeds, 0.5):.2f} times as long as predicted, as instances told (median)."
                if found.speeds
                else ""
            ),
        ],
        passed=max(errors) <= BAR,
        figures=tuple((f"{row[0].replace(' ', '_')}_error", error) for row, error in zip(rows, errors, strict=True)),
    )


def _read(recording: Path) -> Recorded:
    header, entries = read(chunks(recording))
    found, arrived = Recorded(header.config, {}, [], [], [], []), dict[str, float]()
    for entry in entries:
        event = entry.event
        if isinstance(event, FromNode):
            _heard(found, arrived, event, entry.now)
        elif isinstance(event, Arrived):
            arrived[event.request.request_id] = event.request.arrived_s
        elif isinstance(event, Ended) and event.outcome == "ok" and event.ttft_s is not None:
            found.ttft_s.append(event.ttft_s)
            if event.tpot_s is not None:
                found.tpot_s.append(event.tpot_s)
    if min(len(found.ttft_s), len(found.tpot_s)) < MIN_ENDED:
        raise InvalidValue(
            f"{len(found.tpot_s)} requests of several tokens ended well in {recording}; record at least {MIN_ENDED}"
        )
    return found


def _heard(found: Recorded, arrived: dict[str, float], event: FromNode, now: float) -> None:
    message = event.message
    if isinstance(message, Hello):
        found.hellos[event.instance_id] = message
    elif isinstance(message, Reserved) and message.request_id in arrived:
        found.answer_s.append(now - arrived.pop(message.request_id))
    elif isinstance(message, Heartbeat) and message.load.num_running:
        found.speeds.append(message.load.speed)


def _node(hello: Hello) -> NodeSpec:
    hardware = hello.hardware
    return NodeSpec(
        id=hello.instance_id, role=hello.role, hardware=hardware.name, num_gpus=hardware.num_gpus,
        price_per_hour=hardware.price_per_hour, latency=None if hello.role is Role.KV_POOL else hello.latency,
        link_bytes_per_s=hardware.link_bytes_per_s, num_blocks=hello.num_blocks, token_budget=hello.token_budget,
        host=hello.host_id,
    )  # fmt: skip
