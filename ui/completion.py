"""What a streamed completion is made of, and the times that are kept of one. It reads no socket."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """`text` in plain completions, `delta` in chat."""

    text: str = ""
    delta: Delta = Delta()
    finish_reason: str | None = None

    @property
    def piece(self) -> str:
        return self.text or self.delta.content or ""


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct, frozen=True):
    """One event of the stream."""

    id: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None


CHUNKS = msgspec.json.Decoder(Chunk)


@dataclass(slots=True)
class Times:
    """When tokens came, on the caller's clock, by the definitions of docs/metrics.md."""

    first: float | None = None
    last: float | None = None
    max_itl_s: float | None = None
    num_chunks: int = 0

    def mark(self, choice: Choice, now: float) -> None:
        """Text, or the end: the last token may have no text of its own, such as the one that ends the answer."""
        if not choice.piece and choice.finish_reason is None:
            return
        if self.last is not None:
            self.max_itl_s = max(self.max_itl_s or 0.0, now - self.last)
        self.first = now if self.first is None else self.first
        self.last = now
        self.num_chunks += 1

    def tpot_s(self, num_output: int) -> float | None:
        """(tn - t1) / (n - 1); None for fewer than two tokens."""
        if self.first is None or self.last is None or num_output < 2:
            return None
        return (self.last - self.first) / (num_output - 1)
