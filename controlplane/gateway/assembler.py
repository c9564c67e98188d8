"""One output's tokens to pieces of text a client may see: stop strings, hidden stop tokens, held-back tails.

Pure text work: no ordering, no timing, no client. It ends at the first stop string; what follows is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from controlplane.gateway.detokenizer import Detokenizer
from transfer.terms import FinishReason, TokenLogprob


@dataclass(slots=True)
class Piece:
    """What one chunk of a client's stream carries. finish is set on the last piece of an output."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None


def token_ids(pieces: Sequence[Piece], wanted: bool) -> dict[str, list[int]]:
    """The extra key of a choice whose client asked for ids; nothing otherwise."""
    return {"token_ids": [token_id for piece in pieces for token_id in piece.token_ids]} if wanted else {}


class Assembler:
    """Feeds tokens, gives pieces; tokens whose text is held back travel with the next piece that has text."""

    __slots__ = (
        "_detokenizer", "_held", "_hold", "_ids", "_include_stop", "_logprobs", "_min_tokens", "_num_tokens", "_stops",
        "done",
    )  # fmt: skip

    def __init__(
        self, detokenizer: Detokenizer | None, stops: Sequence[str] = (), min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:  # fmt: skip
        """detokenizer None: tokens only. A stop string counts once min_tokens tokens came before its last one."""
        self._detokenizer, self._stops = detokenizer, tuple(stops)
        self._min_tokens, self._include_stop = min_tokens, include_stop
        self._hold = max(map(len, self._stops), default=0) - 1
        self._held = ""
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_tokens = 0
        self.done = False

    def feed(
        self, token_ids: Sequence[int], finish: FinishReason | None, logprobs: Sequence[TokenLogprob] | None = None
    ) -> tuple[Piece | None, int]:
        """New tokens -> (piece or None while held back, how many of the tokens belong to the output).

        A piece with finish ends it: by `finish` (STOP: the last token is a stop token and is not shown) or by
        a stop string, with all tokens up to the one that completes it.
        """
        text, used = self._held, 0
        self._held = ""
        stopped = False
        shown = len(token_ids) - (finish is FinishReason.STOP)
        for place, token_id in enumerate(token_ids):
            self._ids.append(token_id)
            if logprobs is not None:
                self._logprobs.append(logprobs[place])
            used += 1
            self._num_tokens += 1
            if self._detokenizer is None or place >= shown:
                continue
            new = self._detokenizer.add(token_id)
            if new:
                text += new
                if self._stops and (found := self._stop(text, len(new))) is not None:
                    text, stopped = text[:found], True
                    break
        if not stopped and finish is not None and self._detokenizer is not None:
            tail = self._detokenizer.flush()
            text += tail
            if tail and self._stops and (found := self._stop(text, len(tail))) is not None:
                text, stopped = text[:found], True
        if stopped:
            finish = FinishReason.STOP
        return self._piece(text, finish), used

    def _stop(self, text: str, num_new: int) -> int | None:
        """Where to cut `text`, whose last num_new characters are new, at the earliest stop string; None without."""
        if self._num_tokens <= self._min_tokens:
            return None
        cut: int | None = None
        for stop in self._stops:
            # Only a match that ends in the new characters counts; those before were looked at already.
            at = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
            if at >= 0:
                end = at + len(stop) if self._include_stop else at
                cut = end if cut is None else min(cut, end)
        return cut

    def _piece(self, text: str, finish: FinishReason | None) -> Piece | None:
        if finish is None and self._hold > 0 and (held := self._num_held(text)):
            text, self._held = text[:-held], text[-held:]
        if not text and finish is None and self._detokenizer is not None:
            return None
        piece = Piece(text, self._ids, self._logprobs, finish)
        self._ids, self._logprobs = [], []
        self.done = finish is not None
        return piece

    def _num_held(self, text: str) -> int:
        """Characters at the end that may turn out to begin a stop string."""
        for length in range(min(self._hold, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
