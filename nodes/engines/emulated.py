"""An engine that keeps time instead of computing: it sleeps a LatencyProfile and writes checkable KV.

The KV of a position is a 32-bit rolling hash of every token up to it, so a chunk continues from the KV in the
arena, not from memory of its own, and a handoff that mixes up, loses or reuses a block is found out: before a
token is drawn, the KV of its whole context is compared with what the tokens say. The token drawn is a function
of the tokens before it alone, so text is the same by any path. No torch, no threads; runs on a virtual clock.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nodes.engines.engine import Chunk, LayerGate, OnLayer, Sampled, StepBatch, StepResult
from nodes.engines.prediction import predicted_step_s
from transfer.errors import EngineFailed, InvalidValue, StepAbandoned
from transfer.kv.arena import HostArena, KvArena
from transfer.profile import LatencyProfile
from transfer.terms import KvLayout, ModelIdentity, RequestId, TokenLogprob

BYTE_VOCABULARY = 257
END_OF_TEXT = 256
MAX_CONTEXT = 131072

ROOT = 0x9E3779B9
MULTIPLIER = 0x915F77F5
INVERSE = pow(MULTIPLIER, -1, 1 << 32)
MASK = 0xFFFFFFFF
ALPHABET = b"etaoinshrdlcumwfgypbvkxjqz      "
FULL_CHECK_EVERY = 16
MAX_CARRY_S = 0.001
MAX_DEBT_S = 0.05
MAX_FOLLOWED = 1024

States = NDArray[np.uint32]


def emulated_identity(name: str, max_context: int = MAX_CONTEXT) -> ModelIdentity:
    """The identity of an emulated model: byte-level vocabulary, ids 0..255 are bytes, 256 ends the text."""
    return ModelIdentity(
        name=name,
        revision=hashlib.sha256(f"emulated\0{name}".encode()).hexdigest(),
        tokenizer=hashlib.sha256(b"emulated\0bytes").hexdigest(),
        vocab_size=BYTE_VOCABULARY,
        max_context=max_context,
        eos_token_ids=(END_OF_TEXT,),
    )


def emulated_layout(block_size: int) -> KvLayout:
    """One layer, two bytes for K and two for V a token: the low and high half of the rolling hash."""
    return KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=block_size, dtype="uint8", rope="emulated")


def continuation(tokens: Sequence[int], num_tokens: int, banned: Sequence[int] = ()) -> list[int]:
    """The next `num_tokens` ids after `tokens`: the reference every path must reproduce."""
    state, out = int(_states(np.asarray(tokens, dtype=np.uint32), ROOT)[-1]), list[int]()
    for _ in range(num_tokens):
        out.append(_draw(state, banned))
        state = _next(state, out[-1])
    return out


class EmulatedEngine:
    """Engine protocol over a profile. `speed` divides every time (inf: no time at all); `jitter` spreads steps
    uniformly by that fraction, drawn from `seed`. Idempotent like every engine.

    A step raises EngineFailed when KV does not match the tokens; num_corruptions counts them.
    """

    kind = "emulated"

    def __init__(
        self, latency: LatencyProfile, model: ModelIdentity, num_blocks: int, *, block_size: int = 16,
        speed: float = 1.0, jitter: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        if not speed > 0:
            raise InvalidValue(f"the speed of an emulated engine must be above 0, got {speed}")
        if not 0 <= jitter < 1:
            raise InvalidValue(f"the jitter of an emulated engine must be from 0 to below 1, got {jitter}")
        self.latency, self.hardware, self.model = latency, latency.hardware, model
        self.layout, self.num_blocks = emulated_layout(block_size), num_blocks
        self._host_arena = HostArena(self.layout, num_blocks)
        self.arena: KvArena = self._host_arena
        self.num_corruptions = 0
        halves = np.frombuffer(self._host_arena.buffer, dtype=np.uint16).reshape(2, num_blocks, block_size)
        self._low, self._high = halves[0], halves[1]
        self._speed, self._jitter, self._random = speed, jitter, random.Random(seed)
        self._deadline = 0.0
        self._woke = float("-inf")
        self._followed: dict[RequestId, tuple[int, int]] = {}

    async def step(
        self, batch: StepBatch, on_layer: OnLayer | None = None, before_layer: LayerGate | None = None
    ) -> StepResult:
        """The arena's one layer stands for all of the model's: its KV is there, then each layer takes its share of the
        time and begins when the emulated link has brought it, the last one also when the KV has really come."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        # A late wake-up is taken off the next step, so that a busy machine does not slow the emulated one down.
        carried = start - self._woke <= MAX_CARRY_S
        begin = max(self._deadline, start - MAX_DEBT_S) if carried else start
        since = self._woke if carried else start
        duration_s = self._duration_s(batch)
        self._deadline = begin + duration_s
        if before_layer is not None:
            await self._wait(before_layer, duration_s)
        waited_s = self._deadline - begin - duration_s
        sampled = {c.request_id: token for c in batch.chunks if (token := self._run(c)) is not None}
        await asyncio.sleep(max(0.0, self._deadline - loop.time()))
        self._woke = loop.time()
        if on_layer is not None:
            on_layer(0)
        return StepResult(sampled=sampled, duration_s=self._woke - since, waited_s=waited_s)

    def handoff_s(self, num_tokens: int) -> float:
        """Seconds the emulated link needs for the KV of `num_tokens` tokens of the emulated model."""
        return self.latency.transfer_s(num_tokens) / self._speed

    async def close(self) -> None:
        # The views into the arena go first: memory cannot be unmapped under them.
        self._low = self._high = np.empty((0, 0), dtype=np.uint16)
        self._host_arena.close()

    async def _wait(self, gate: LayerGate, duration_s: float) -> None:
        """Wait for the KV, and put the step's end where its slowest layer puts it."""
        loop, num_layers = asyncio.get_running_loop(), self.latency.shape.num_layers
        try:
            await gate.ready(0)
        except StepAbandoned:
            self._woke = self._deadline = loop.time()
            raise
        # Layer l begins when it is there; l's arrival is linear in l, so the first or the last one decides.
        last_s = max(gate.due(num_layers - 1, num_layers), loop.time()) + duration_s / num_layers
        self._deadline = max(self._deadline, gate.due(0, num_layers) + duration_s, last_s)

    def _duration_s(self, batch: StepBatch) -> float:
        predicted = predicted_step_s(self.latency, batch.chunks)
        spread = 1.0 + self._jitter * self._random.uniform(-1.0, 1.0) if self._jitter else 1.0
        return predicted * spread / self._speed

    def _run(self, chunk: Chunk) -> Sampled | None:
        end = chunk.start + len(chunk.tokens)
        state = self._read(chunk, chunk.start - 1) if chunk.start else ROOT
        if chunk.sampling is not None:
            self._verify(chunk, chunk.sampling.history, state)
        if len(chunk.tokens) == 1:
            state = _next(state, chunk.tokens[0])
            block, offset = self._place(chunk, chunk.start)
            self._low[block, offset], self._high[block, offset] = state & 0xFFFF, state >> 16
        else:
            states = _states(np.asarray(chunk.tokens, dtype=np.uint32), state)
            positions = np.arange(chunk.start, end)
            blocks = np.asarray(chunk.block_table)[positions // self.layout.block_size]
            self._low[blocks, positions % self.layout.block_size] = states & np.uint32(0xFFFF)
            self._high[blocks, positions % self.layout.block_size] = states >> np.uint32(16)
            state = int(states[-1])
        if chunk.sampling is None:
            return None
        token = _draw(state, chunk.sampling.banned)
        return Sampled(token, _logprob(token, state, chunk.sampling.params.logprobs))

    def _verify(self, chunk: Chunk, history: Sequence[int], state: int) -> None:
        """Compare the KV of positions before the chunk with the tokens: all of it when the sequence is new here
        and every FULL_CHECK_EVERY tokens, its last position (which hashes the others) in between."""
        start, request_id = chunk.start, chunk.request_id
        followed = self._followed.pop(request_id, None)
        if followed is None and len(self._followed) >= MAX_FOLLOWED:
            self._followed.pop(next(iter(self._followed)))
        if followed is not None and followed[0] == start and start % FULL_CHECK_EVERY:
            bad = start - 1 if followed[1] != state else -1
        else:
            bad = self._first_wrong(chunk, history)
        if bad >= 0:
            self.num_corruptions += 1
            raise EngineFailed(
                f"KV of request {request_id} does not match its tokens at position {bad} "
                f"(block {chunk.block_table[bad // self.layout.block_size]}); the KV it was given is wrong"
            )
        if len(chunk.tokens) == 1:
            self._followed[request_id] = (start + 1, _next(state, chunk.tokens[0]))

    def _first_wrong(self, chunk: Chunk, history: Sequence[int]) -> int:
        if not chunk.start:
            return -1
        table = np.asarray(chunk.block_table[: self.layout.num_blocks(chunk.start)])
        low = self._low[table].reshape(-1)[: chunk.start].astype(np.uint32)
        found = low | self._high[table].reshape(-1)[: chunk.start].astype(np.uint32) << np.uint32(16)
        expected = _states(np.asarray(history[: chunk.start], dtype=np.uint32), ROOT)
        wrong = np.flatnonzero(found != expected)
        return int(wrong[0]) if wrong.size else -1

    def _read(self, chunk: Chunk, position: int) -> int:
        block, offset = self._place(chunk, position)
        return int(self._low[block, offset]) | int(self._high[block, offset]) << 16

    def _place(self, chunk: Chunk, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.layout.block_size)
        return chunk.block_table[index], offset


def _next(state: int, token: int) -> int:
    return (state + token + 1) * MULTIPLIER & MASK


def _states(tokens: NDArray[np.uint32], state: int) -> States:
    """States after each token: h[n] = M^n (h[0] + sum over i < n of (t[i] + 1) / M^i), modulo 2^32."""
    up, down = _powers(len(tokens))
    sums = np.cumsum((tokens + np.uint32(1)) * down, dtype=np.uint32)
    return (sums + np.uint32(state)) * up


def _powers(num: int) -> tuple[States, States]:
    """M^1..M^num and M^0..M^-(num-1). Grown by doubling, kept for the process: at most the longest context."""
    global _UP, _DOWN  # noqa: PLW0603  a memo of constants
    while len(_UP) < num:
        _UP = np.concatenate((_UP, _UP * _UP[-1]))
        _DOWN = np.concatenate((_DOWN, _DOWN * np.uint32(int(_DOWN[-1]) * INVERSE & MASK)))
    return _UP[:num], _DOWN[:num]


_UP: States = np.array([MULTIPLIER], dtype=np.uint32)
_DOWN: States = np.array([1], dtype=np.uint32)


def _draw(state: int, banned: Sequence[int]) -> int:
    mixed = (state ^ state >> 15) * 0x2C1B3C6D & MASK
    index = (mixed ^ mixed >> 12) >> 13
    for step in range(len(ALPHABET)):
        token = ALPHABET[(index + step) % len(ALPHABET)]
        if token not in banned:
            return token
    for token in range(END_OF_TEXT):  # a request that bans the whole alphabet must not cost the instance
        if token not in banned:
            return token
    raise EngineFailed("every id the emulated engine can draw is banned; allow one of 0..255")


def _logprob(token: int, state: int, num_top: int | None) -> TokenLogprob | None:
    if num_top is None:
        return None
    first = -0.05 - (state & 0xFF) / 1024
    others = [other for other in dict.fromkeys(ALPHABET) if other != token][: max(0, num_top - 1)]
    top_ids = (token, *others)[:num_top]
    return TokenLogprob(
        logprob=first, top_ids=top_ids, top_logprobs=tuple(first - 1.5 * i for i in range(len(top_ids)))
    )
