"""One request of a trace: when it comes, how large it is, which of its prompt others share. It carries no text."""

from __future__ import annotations

from transfer.terms import Struct


class TraceRequest(Struct, frozen=True):
    """at_s counts from the start of the trace. Token counts are at least 1.

    blocks: ids of leading spans of `block_tokens` prompt tokens each (the last may be partial); equal ids at the same
    place after equal ids stand for equal text. Empty: the prompt shares nothing.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 512
    traffic_class: str = ""
    """Empty: the fleet's default class."""
    tenant: str = ""
    priority: int = 0
    """Lower is served first."""
