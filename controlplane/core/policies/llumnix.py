"""Llumnix (OSDI'24; PD form of its open-source scheduler): pack decode up to a bound, migrate to keep it so."""

from __future__ import annotations

from controlplane.core.instance import Instance
from controlplane.core.policies.pairs import Score, split
from controlplane.core.policies.protocol import Answer, Move, Overview, Policy, Situation
from transfer.said import Said, say

PACK = 0.85
MIGRATE_OUT = 0.95
CONSOLIDATE = 0.60
"""Of the pace objective: pack up to the first, migrate out above the second, empty an instance below the third."""


def place(at: Situation) -> Answer:
    """Prefill: the earliest done by the load charged to it. Decode: the HIGHEST predicted pace within .85 of the
    objective, else the lowest."""
    estimator, tokens = at.estimator, at.wanted.num_tokens - 1
    bound_s = PACK * at.wanted.slo.tpot_s if at.wanted.slo is not None else 0.0

    def done_s(one: Instance) -> float:
        held = estimator.held(one)
        return estimator.queue_s(one) + estimator.compute_s(one, tokens - held, held)

    def packed(one: Instance) -> tuple[float, float]:
        step_s = estimator.step_s(one)
        return (0.0, -step_s) if step_s <= bound_s else (1.0, step_s)

    def says(one: Instance) -> Said:
        return say("score.packed", seconds=f"{estimator.step_s(one):.3g}", bound=f"{bound_s:.3g}")

    decode = Score(packed, says)
    whole = Score(lambda one: (*packed(one), done_s(one)), decode.say)
    prefill = Score(done_s, lambda one: say("score.done", seconds=f"{done_s(one):.3g}"))
    return split(at, prefill, decode, whole)


def moves(seen: Overview) -> list[Move]:
    """From every decode above .95 of the objective to the fullest that stays within .85; from one below .60, the
    emptiest, if the others can take all of it. The smallest requests go first."""
    decodes = seen.group.decodes
    if seen.tpot_s is None or len(decodes) < 2:
        return []
    found: list[Move] = []
    for one in decodes:
        if one.hello.moves and one.rows > 1 and _step_s(one) > MIGRATE_OUT * seen.tpot_s:
            found += _moves(seen, one, seen.tpot_s, most=1)
    if found:
        return found
    busy = [one for one in decodes if one.rows]
    low = [one for one in busy if one.hello.moves and _step_s(one) < CONSOLIDATE * seen.tpot_s]
    if len(busy) > 1 and low:
        source = min(low, key=lambda one: (one.rows, one.id))
        moved = _moves(seen, source, seen.tpot_s, most=source.rows)
        return moved if len(moved) == source.rows else []
    return []


def _moves(seen: Overview, source: Instance, tpot_s: float, most: int) -> list[Move]:
    running = sorted(
        (one for one in seen.running(source) if one.decoding), key=lambda one: (one.num_tokens, one.request_id)
    )
    size = seen.group.layout.block_size
    rows = {one.id: (one.rows, one.context_tokens, one.room) for one in seen.group.decodes if one is not source}
    found = []
    for request in running[:most]:
        best: tuple[float, Instance] | None = None
        for one in seen.group.decodes:
            if one is source or one.full or not (one.rows or rows[one.id][0]):
                continue  # waking an empty instance up is no consolidation
            num, context, room = rows[one.id]
            step_s = one.profile.decode_step_s(num + 1, context + request.num_tokens) * one.speed
            fits = room >= 2 * (request.num_tokens // size + 1)
            if fits and step_s <= PACK * tpot_s and (best is None or step_s > best[0]):
                best = (step_s, one)
        if best is None and most == 1:
            best = _lightest(seen, source, request.num_tokens, tpot_s)
        if best is None:
            break
        num, context, room = rows[best[1].id]
        rows[best[1].id] = (num + 1, context + request.num_tokens, room - request.num_tokens // size - 1)
        found.append(Move(request.request_id, source, best[1]))
    return found


def _lightest(seen: Overview, source: Instance, num_tokens: int, tpot_s: float) -> tuple[float, Instance] | None:
    """An empty instance may take what an overloaded one has too much."""
    idle = [one for one in seen.group.decodes if one is not source and not one.rows and not one.full]
    if not idle:
        return None
    one = min(idle, key=lambda one: (one.step_s(num_tokens), one.id))
    step_s = one.step_s(num_tokens)
    return (step_s, one) if step_s <= PACK * tpot_s else None


def _step_s(one: Instance) -> float:
    return one.profile.decode_step_s(one.rows, one.context_tokens) * one.speed


BIN_PACKING = Policy(place, moves=moves)
