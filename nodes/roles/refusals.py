"""How a node says no to work: each kind of order has its own answer, always with a sentence."""

from __future__ import annotations

from transfer.wire.messages import Message, Migrate, MigrateFailed, Prefill, PrefillFailed, Reserve, ReserveRefused

Order = Prefill | Reserve | Migrate


def refusal(order: Order, reason: str, *, retry: bool = False, free_blocks: int = 0) -> Message:
    """The message that turns `order` down. retry, free_blocks: for a Reserve, see ReserveRefused."""
    request_id, generation = order.request_id, order.generation
    match order:
        case Prefill():
            return PrefillFailed(request_id=request_id, generation=generation, reason=reason)
        case Reserve():
            return ReserveRefused(
                request_id=request_id, generation=generation, reason=reason, retry=retry, free_blocks=free_blocks
            )
        case Migrate():
            return MigrateFailed(request_id=request_id, generation=generation, reason=reason)
