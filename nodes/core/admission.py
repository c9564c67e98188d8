"""What every core of one instance does with requests: who comes in, what is told of blocks, how long each may wait.

What computes them is BatchCore's (batching.py: steps of an engine) or ServedCore's (served.py: an engine that batches
by itself). Pure: performs nothing and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nodes.core.endings import Endings
from nodes.core.events import (
    Add,
    Admitted,
    Cached,
    Computed,
    Drop,
    Effect,
    Event,
    Fetched,
    Grow,
    Handed,
    HandsChanged,
    KvReady,
    NotAdmitted,
    Pin,
    Renew,
    SequenceSpec,
    Tick,
    Unpin,
    Work,
)
from nodes.core.fetching import Fetching
from nodes.core.pins import Pins
from nodes.core.questions import Questions
from nodes.core.residency import Residency
from nodes.core.sequence import Roster, Sequence
from nodes.core.takeover import Takeover

Handlers = dict[type[Event], Callable[[Any, float, list[Effect]], None]]


class Admission(Questions):
    """All sequences of one instance, by events in and effects out.

    Guarantees: an Add is answered by Admitted or NotAdmitted (prefill work maybe later); every admitted sequence ends
    with exactly one Gone. A repeated Add, Drop or Handed is harmless. Raises IllegalTransition when a role breaks the
    order of events.
    """

    def __init__(self, residency: Residency, roster: Roster, endings: Endings) -> None:
        self.config = residency.config
        self._roster, self._residency, self._endings = roster, residency, endings
        self._pool = residency.pool
        self._takeover = Takeover(roster, residency, endings)
        self._fetching = Fetching(roster, residency)
        self._pins = Pins(self._pool)
        self._num_arrivals = 0
        self._blocked: tuple[object, ...] = ()
        self._handlers: Handlers = {
            Add: self._add,
            Fetched: self._fetched,
            Renew: self._renew,
            KvReady: lambda event, now, effects: self._takeover.kv_ready(event, effects),
            Grow: self._takeover.grow,
            Handed: lambda event, now, effects: self._forget(event, "handed", effects),
            Drop: lambda event, now, effects: self._forget(event, "drop", effects),
            Pin: self._pins.pin,
            Unpin: lambda event, now, effects: self._pins.unpin(event.name),
            Tick: self._tick,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; the role performs the effects in order, before it handles another."""
        effects: list[Effect] = []
        self._handlers[type(event)](event, now, effects)
        self._make_room()
        if self._roster.waiting:
            self._admit_waiting(now, effects)
        if self._pool.has_changes:
            taken, stored, removed = self._pool.drain()
            if taken:
                effects.insert(0, HandsChanged(blocks=taken))
            if stored or removed:
                effects.append(Cached(stored=stored, removed=removed))
        return effects

    # --- what computes them ---------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """After each event, before those that wait are admitted."""

    def _prefilling(self, sequence: Sequence, now: float, effects: list[Effect]) -> None:
        """A sequence has its blocks, and in them what was cached or fetched: the rest of its prompt may be computed."""
        self._maybe_computed(sequence, now, effects)

    # --- requests come --------------------------------------------------------------------------------------

    def _add(self, event: Add, now: float, effects: list[Effect]) -> None:
        spec = event.spec
        here = self._roster.live.get(spec.request_id)
        if here is not None and spec.generation < here.generation:
            older = f"generation {spec.generation} of the request is older than {here.generation}, which is here"
            effects.append(self._refusal(spec, older, retry=False))
            return
        if here is not None and spec.generation == here.generation:
            here.renew(now)
            if here.admitted:
                effects.append(admitted(here, self._residency.num_free))
            return
        if here is not None:
            self._endings.end(here, "drop", effects)
        if reason := self._residency.never_fits(spec):
            effects.append(self._refusal(spec, reason, retry=False))
            return
        waiting = self._roster.waiting
        sequence = self._new_sequence(spec)
        if spec.work is Work.PREFILL:
            if len(waiting) >= self.config.max_waiting:
                full = f"{len(waiting)} requests wait here already (max_waiting)"
                effects.append(self._refusal(spec, full, retry=True))
            else:
                self._roster.add(sequence)
            return
        busy = f"{len(waiting)} requests wait here for free KV blocks" if waiting else self._residency.admit(sequence)
        if busy:
            effects.append(self._refusal(spec, busy, retry=True))
        else:
            self._roster.add(sequence)
            self._place(sequence, now, effects)

    def _new_sequence(self, spec: SequenceSpec) -> Sequence:
        config = self.config
        self._num_arrivals += 1
        return Sequence(
            spec, self._num_arrivals, block_size=config.block_size, max_length=config.max_length,
            eos_token_ids=config.eos_token_ids,
        )  # fmt: skip

    def _refusal(self, spec: SequenceSpec, reason: str, *, retry: bool) -> NotAdmitted:
        return NotAdmitted(
            request_id=spec.request_id, generation=spec.generation, reason=reason, retry=retry,
            free_blocks=self._residency.num_free,
        )  # fmt: skip

    def _admit_waiting(self, now: float, effects: list[Effect]) -> None:
        """In order of rank; the head is never overtaken. Skipped while nothing changed since it found no room."""
        waiting = self._roster.waiting
        while waiting:
            sequence = waiting[0]
            situation = (sequence, self._pool.num_free, self._roster.num_active)
            if situation == self._blocked:
                return
            if self._residency.admit(sequence):
                self._blocked = situation
                return
            self._place(sequence, now, effects)

    def _place(self, sequence: Sequence, now: float, effects: list[Effect]) -> None:
        """A sequence got its blocks: say so the first time, and start what it waits for."""
        if not sequence.admitted:
            sequence.admitted = True
            effects.append(admitted(sequence, self._residency.num_free))
        self._blocked = ()
        sequence.renew(now)
        if sequence.work is Work.RECEIVE:
            self._roster.move(sequence, "receive")
        elif sequence.num_blocks_to_fetch > sequence.have_blocks:
            self._roster.move(sequence, "fetch")
        else:
            self._roster.move(sequence, "prefill")
            self._prefilling(sequence, now, effects)

    # --- KV comes -------------------------------------------------------------------------------------------

    def _fetched(self, event: Fetched, now: float, effects: list[Effect]) -> None:
        sequence = self._fetching.fetched(event)
        if sequence is not None:
            self._prefilling(sequence, now, effects)

    def _maybe_computed(self, sequence: Sequence, now: float, effects: list[Effect]) -> None:
        """Prefill work with KV of all its tokens is done; its receiver's lease starts."""
        if sequence.work is not Work.PREFILL or sequence.num_computed < sequence.num_to_compute:
            return
        self._roster.move(sequence, "computed")
        sequence.renew(now)
        effects.append(computed(sequence))

    # --- small ones -----------------------------------------------------------------------------------------

    def _renew(self, event: Renew, now: float, effects: list[Effect]) -> None:
        if sequence := self._roster.find(event.request_id, event.generation):
            sequence.renew(now)

    def _forget(self, event: Handed | Drop, move: str, effects: list[Effect]) -> None:
        self._endings.forget(event.request_id, event.generation, move, effects)

    def _tick(self, event: Tick, now: float, effects: list[Effect]) -> None:
        self._endings.expire(now, effects)
        self._pins.expire(now, effects)


def admitted(sequence: Sequence, num_free: int) -> Admitted:
    return Admitted(
        request_id=sequence.request_id,
        generation=sequence.generation,
        blocks=list(sequence.table.blocks),
        have_blocks=min(sequence.have_blocks, sequence.num_computed // sequence.block_size),
        free_blocks=num_free,
    )


def computed(sequence: Sequence) -> Computed:
    cached, fetched = (blocks * sequence.block_size for blocks in (sequence.have_blocks, sequence.fetched_blocks))
    return Computed(
        request_id=sequence.request_id,
        generation=sequence.generation,
        computed_tokens=sequence.num_to_compute - cached - fetched,
        cached_tokens=cached,
        fetched_tokens=fetched,
    )
