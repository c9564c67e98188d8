"""What tests of sessions over several links share."""

from __future__ import annotations

from typing import Any

from kv_helpers import (
    TIMEOUT_S,
    TRAILER,
    Pair,
    make_offer,
    push_all,
    until,
)

from transfer.kv.links.bundle import Bundle
from transfer.kv.links.choice import LinkLimits
from transfer.wire.messages import KvPeer

QUICK = LinkLimits(stuck_s=0.25, backoff_s=0.05, longest_backoff_s=0.2)
SLAB = 96 << 10


def links_pair(num_blocks: int = 16, **options: Any) -> Pair:
    return Pair(num_blocks, **({"link_limits": QUICK, "slab_bytes": SLAB} | options))


def bundle_of(pair: Pair) -> Bundle:
    (session,) = pair.prefill._sessions
    link = session._wire.link
    assert isinstance(link, Bundle)
    return link


async def joined(pair: Pair, peer: KvPeer, num_links: int) -> Bundle:
    """Connect, and wait until all links are up on both sides."""
    (await pair.prefill.open(peer, make_offer(0, request_id="warm"), [], TIMEOUT_S)).abort("only to connect")
    bundle = bundle_of(pair)
    await until(lambda: len(bundle.lanes) == num_links)
    await until(lambda: pair.decode.num_streams == 0)
    pair.role.failed.clear()
    return bundle


async def push_over(pair: Pair, peer: KvPeer, request_id: str = "r1") -> None:
    """All blocks of the source to the same blocks of the target."""
    num_blocks = pair.source.num_blocks
    pair.role.granted = list(range(num_blocks))
    blocks = list(range(num_blocks))
    sender = await pair.prefill.open(peer, make_offer(num_blocks, request_id=request_id), blocks, TIMEOUT_S)
    push_all(sender, 0, num_blocks)
    await sender.commit(TRAILER, TIMEOUT_S)


def all_same(pair: Pair) -> bool:
    return bytes(pair.source.buffer) == bytes(pair.target.buffer)
