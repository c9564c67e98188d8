"""What an instance tells about itself: load and holdings, read off the roster and the pool. Changes nothing."""

from __future__ import annotations

from nodes.core.blocks import BlockTable
from nodes.core.residency import Residency
from nodes.core.sequence import Roster, State
from transfer.wire.messages import Holding, LoadReport


def load_report(
    roster: Roster, residency: Residency, pins: list[BlockTable], *, step_s: float = 0.0, speed: float = 1.0,
    unsettled: int = 0,
) -> LoadReport:  # fmt: skip
    """num_waiting counts what does not compute yet. leaked_blocks: references that no table accounts for."""
    by_state, pool = roster.by_state, residency.pool
    fetching = by_state[State.FETCHING]
    in_tables = sum([len(one.table.blocks) for one in roster.everyone()])
    if pins:
        in_tables += sum([len(pin.blocks) for pin in pins])
    return LoadReport(
        num_running=len(roster.prefilling) + len(roster.running) + len(by_state[State.PAUSED]),
        num_waiting=len(roster.waiting) + len(by_state[State.RECEIVING]) + len(fetching),
        queued_prefill_tokens=sum(
            [one.num_to_compute - one.num_computed for one in (*roster.waiting, *fetching, *roster.prefilling)]
        ),
        num_blocks=residency.num_blocks,
        free_blocks=residency.num_free,
        cached_blocks=pool.num_cached,
        step_s=step_s,
        speed=speed,
        unsettled=unsettled,
        num_preemptions=residency.num_preemptions,
        leaked_blocks=abs(pool.num_references - in_tables),
    )


def holdings(roster: Roster) -> tuple[Holding, ...]:
    """Every request that is here, also without a block yet or any more, and those dropped in the running step."""
    return tuple([one.holding() for one in roster.everyone()])
