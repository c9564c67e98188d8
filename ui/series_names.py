"""What the series of GET /v1/series are called, what each is, how its values read, and which one a user means. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from types import MappingProxyType

from ui import figures
from ui.errors import CliError

PULSE = "in_flight"
"""Has a value in every second in which the control plane ran: where it has none, there is no record at all."""
FLEET = MappingProxyType({
    "goodput_per_s": "good requests a second, over 60 s",
    "goodput_10s_per_s": "good requests a second, over 10 s",
    "goodput_per_gpu": "goodput a GPU",
    "throughput_per_s": "requests a second that ended normally, good or not, over 60 s",
    "tokens_per_s": "output tokens a second of good requests",
    "offered_per_s": "arrivals a second, over 10 s",
    "attainment": "share of requests within their objectives, of the last 60 s",
    "cost_per_good": "dollars a good request, over 60 s",
    "ttft_p50_s": "median TTFT of requests that ended in the last 60 s",
    "ttft_p90_s": "90th percentile of TTFT of requests that ended in the last 60 s",
    "tpot_p50_s": "median TPOT of requests that ended in the last 60 s",
    "tpot_p90_s": "90th percentile of TPOT of requests that ended in the last 60 s",
    "in_flight": "requests there",
    "queue_depth": "requests without a place",
    "queued_prefill_tokens": "prompt tokens that wait for compute",
    "num_prefill": "prefill instances",
    "num_decode": "decode instances",
    "num_mixed": "mixed instances",
    "kv_use": "share of the engines' KV blocks in use",
    "pool_use": "share of the pools' blocks in use",
    "hit_device": "share of looked up prompt tokens that an engine had, of the last 60 s",
    "hit_pool_dram": "share of looked up prompt tokens that a pool had in memory, of the last 60 s",
    "hit_pool_ssd": "share of looked up prompt tokens that a pool had on SSD, of the last 60 s",
    "stage.queue_s": "seconds that requests which missed spent waiting for compute, of the last 60 s",
    "stage.decode_admission_s": "seconds that requests which missed waited for room to decode, of the last 60 s",
    "stage.prefill_s": "seconds that requests which missed spent computing the prompt, of the last 60 s",
    "stage.transfer_s": "seconds that requests which missed spent with KV on its way, of the last 60 s",
    "stage.decode_s": "seconds that requests which missed spent from KV received to the first token, of the last 60 s",
    "orphaned_kv_blocks": "KV blocks held for nobody; 0 at rest",
})  # fmt: skip
CLASS = MappingProxyType({
    **{name: FLEET[name] for name in ("goodput_per_s", "throughput_per_s", "attainment", "ttft_p50_s", "ttft_p90_s",
                                      "tpot_p50_s", "tpot_p90_s")},
    "doomed": "requests in flight and already past an objective",
})  # fmt: skip
MODEL = MappingProxyType({name: CLASS[name] for name in CLASS if name != "doomed"})
INSTANCE = MappingProxyType({
    "num_running": "sequences in its batch",
    "num_waiting": "sequences that wait for it",
    "kv_use": "share of its KV blocks in use",
    "step_s": "how long its steps take",
    "speed": "how long its steps take over what its profile predicts",
    "tpot_p50_s": "median TPOT of requests that ended on it in the last 60 s",
})  # fmt: skip
KNOWN = MappingProxyType({"": FLEET, "class": CLASS, "model": MODEL, "instance": INSTANCE})
"""By the kind of owner."""
UNITS = ("_per_s", "_s")
"""Ends of names that may be left out."""
NUM_NEAR = 3


def meaning(name: str) -> str:
    """What a series is; empty for one that this release does not know."""
    kind, _, rest = name.partition(".")
    return KNOWN[kind].get(rest.rpartition(".")[2], "") if kind in KNOWN else FLEET.get(name, "")


def owners(names: Sequence[str], kind: str) -> list[str]:
    """Of `class`, `model` or `instance`: those that have series."""
    lead = f"{kind}."
    return [*dict.fromkeys(name[len(lead) :].rpartition(".")[0] for name in names if name.startswith(lead))]


def figure(name: str) -> Callable[[float], str]:
    """How its values read."""
    field = name.rpartition(".")[2]
    for ends, reads in _FIGURES:
        if field.endswith(ends):
            return reads
    return _number


def chosen(asked: Sequence[str], lead: str, names: Sequence[str]) -> list[str]:
    """The series that are meant: by name, without its unit, or by the beginning and a star. lead: `class.chat.` for
    those of a class, and so on. One that is known and has no value yet is meant, too. Raises CliError that names the
    nearest."""
    found: dict[str, None] = {}
    kind, owner = _owner(lead)
    known = KNOWN[kind] if not kind or owner in owners(names, kind) else {}
    for text in asked:
        full = lead + text
        if full.endswith("*"):
            matching = [name for name in names if name.startswith(full[:-1])]
        else:
            ends = (text, *(text + unit for unit in UNITS))
            matching = [lead + end for end in ends if lead + end in names or end in known][:1]
        if not matching:
            raise CliError(_unknown(text, lead, names))
        found |= dict.fromkeys(matching)
    return [*found]


def listed(lead: str, names: Sequence[str]) -> list[str]:
    """Those of one owner, or all. Raises CliError where it has none."""
    found = [name for name in names if name.startswith(lead)]
    if lead and not found:
        raise CliError(_unknown("", lead, names))
    return found


def _owner(lead: str) -> tuple[str, str]:
    kind, _, owner = lead.removesuffix(".").partition(".")
    return kind, owner


def _unknown(text: str, lead: str, names: Sequence[str]) -> str:
    kind, owner = _owner(lead)
    if kind and owner not in (known := owners(names, kind)):
        what = "traffic class" if kind == "class" else kind
        return f"no {what} {owner!r} has left a record; there are {', '.join(known[:8]) or 'none'}"
    own = [name[len(lead) :] for name in names if name.startswith(lead)]
    near = get_close_matches(text, own, NUM_NEAR, 0.5) or [name for name in own if text and text in name][:NUM_NEAR]
    hint = f"; did you mean {' or '.join(near)}?" if near else ";"
    return f"there is no series {text!r}{hint} `phaseplane series` lists them"


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


_FIGURES: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("goodput_per_gpu", figures.per_gpu), ("_per_s", figures.per_s), ("cost_per_good", figures.money),
    ("attainment", figures.share), ("_use", figures.share), ("hit_device", figures.share),
    ("hit_pool_dram", figures.share), ("hit_pool_ssd", figures.share), ("_s", figures.seconds),
    ("speed", lambda value: f"x{value:.2f}"),
)  # fmt: skip
"""By the end of a name; the first that fits."""
