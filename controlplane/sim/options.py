"""What `python -m controlplane.sim` is told: flags, faults and objectives as data. It simulates nothing."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from controlplane.core.config import DEFAULT_CLASS, CoreConfig, check_config
from controlplane.core.policies.names import DEFAULT_POLICY, POLICY_NAMES
from controlplane.sim.recordings import FORMAT as RECORDING
from controlplane.sim.recordings import is_recording, read_recording
from controlplane.sim.spec import Fault, NodeSpec
from transfer.errors import InvalidValue
from transfer.objectives import parse_objectives
from transfer.program import Parser
from transfer.said import Said, say
from transfer.traces.generating import KINDS, is_generated
from transfer.traces.loading import Wanted, load_trace, offered
from transfer.traces.reading import FORMATS, Trace

PROGRAM = "phaseplane simulate"
_FAULT = re.compile(
    r"(?P<kind>kill|slow|mute):(?P<instance>[^@]*?)(?:x(?P<factor>[\d.]+))?"
    r"@(?P<at>[\d.]+)(?:\+(?P<duration>[\d.]+))?"
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="Simulate a fleet on a trace, with the scheduler that serves.")
    flag = parser.add_argument
    flag("--trace", default="generated:conversation", help=f"a file, or generated:NAME of {', '.join(KINDS)}")
    flag("--format", choices=(*FORMATS, RECORDING), help="of the file; by default recognised")
    flag("--trace-start", type=float, default=0.0, metavar="S", help="skip so many seconds of the trace")
    flag("--rate", type=float, help="requests a second; by default as recorded")
    flag("--num", type=int, help="how many requests at most")
    flag("--duration", type=float, metavar="S", help="seconds of the trace")
    flag("--fleet", required=True, help="like 8xH800:prefill,8xH20:decode,2xCPU:kv_pool")
    flag("--model", required=True, help="like llama-3.1-70b")
    flag("--slo", action="append", default=[], help="ttft=2,tpot=0.2, or CLASS=ttft:2,tpot:0.2; may repeat")
    flag("--policy", default=DEFAULT_POLICY, help=", ".join(POLICY_NAMES))
    flag("--reject", choices=("never", "hopeless", "objective"), default="hopeless",
         help="early 429: never, when a request would time out, or when it would miss its objective")  # fmt: skip
    flag("--autopilot", choices=("off", "advise", "auto"), default="off",
         help="role switches for goodput: not looked for, proposed, or made")  # fmt: skip
    flag("--seed", type=int, default=0, help="of everything random: traffic, noise, ties")
    flag("--fault", action="append", default=[], help="kill:d0@60+30, slow:d0x3@60+120, mute:@60+10; may repeat")
    flag("--block-size", type=int, default=512, help="tokens of a KV block")
    flag("--stepwise", action="store_true", help="every step by itself: slower, equal")
    flag("--no-compile", action="store_true", help="plain Python: equal, about half as fast")
    flag("--plot", action="store_true", help="draw in the terminal")
    flag("--png", type=Path, metavar="FILE", help="draw into a file")
    flag("--json", action="store_true", help="one JSON document on standard output")
    return parser


def parse_faults(texts: Sequence[str], nodes: Sequence[NodeSpec]) -> tuple[Fault, ...]:
    """KIND:INSTANCE@AT+DURATION each, or several joined by commas, in order of time. Raises InvalidValue."""
    ids = [node.id for node in nodes]
    faults: list[Fault] = []
    for text in filter(None, (part.strip() for whole in texts for part in whole.split(","))):
        found = _FAULT.fullmatch(text)
        numbers = {} if found is None else {key: _number(found[key]) for key in ("at", "duration", "factor")}
        if found is None or any(value is not None and math.isnan(value) for value in numbers.values()):
            raise InvalidValue(
                f"{text!r} is not a fault; write it like kill:{ids[0]}@60+30, slow:{ids[0]}x3@60+120 or mute:@60+10 "
                "(seconds, from the start)"
            )
        kind, instance, factor = found["kind"], found["instance"], numbers["factor"]
        if (kind == "slow") != (factor is not None):
            raise InvalidValue(f"{text!r}: a slow instance takes a factor, others none, like slow:{ids[0]}x3@60+120")
        if not numbers["duration"] and kind != "kill":
            raise InvalidValue(f"{text!r}: say for how many seconds, like {kind}:{ids[0]}@60+30")
        if instance not in ids and not (kind == "mute" and instance == ""):
            nearest = difflib.get_close_matches(instance, ids, n=1, cutoff=0.0)[0]
            raise InvalidValue(
                f"{text!r}: this fleet has no instance {instance!r}; did you mean {nearest}? It has {', '.join(ids)}"
            )
        faults.append(
            Fault(
                at_s=numbers["at"] or 0.0, kind=kind, instance=instance, duration_s=numbers["duration"] or 0.0,
                factor=factor or 1.0,
            )
        )  # fmt: skip
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def core_config(
    policy: str, slo_texts: Sequence[str], reject: str = "hopeless", autopilot: str = "off"
) -> tuple[CoreConfig, tuple[Said, ...]]:
    """The scheduler's settings, and a note where a default decides. Raises InvalidValue."""
    config = CoreConfig()
    classes = dict(config.classes)
    for name, slo in parse_objectives(slo_texts).items():
        classes[name or DEFAULT_CLASS] = slo
    notes: list[Said] = []
    own = classes[DEFAULT_CLASS]
    if own is not None and own == config.classes[DEFAULT_CLASS] and not slo_texts:
        notes.append(say("trace.objectives", ttft=f"{own.ttft_s:g}", tpot=f"{own.tpot_s:g}"))
    chosen = replace(config, policy=policy, classes=classes, early_reject=reject, autopilot=autopilot)
    return check_config(chosen), tuple(notes)


def read_input(source: str, format: str | None, wanted: Wanted, block_tokens: int) -> Trace:
    """A trace of any kind, our recordings included, cut and scaled. Raises InvalidValue."""
    if format == RECORDING or (format is None and not is_generated(source) and is_recording(Path(source))):
        return offered(read_recording(Path(source), block_tokens), wanted)
    return load_trace(source, wanted, format)


def _number(text: str | None) -> float | None:
    """nan for what is none."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return math.nan
