"""Links that join a session, are turned away or end with it; and a seeded nemesis over all of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
from kv_helpers import (
    TIMEOUT_S,
    Pair,
    Proxy,
    block_bytes,
    peer_of,
    proxied_links,
    until,
)
from kv_link_helpers import SLAB, all_same, joined, links_pair, push_over

from transfer.errors import KvError, KvTransferFailed


@pytest.mark.parametrize("key", [None, b"a long enough secret of 32 bytes"])
async def test_nobody_joins_a_session_without_its_token(key: bytes | None):
    async with links_pair(links=2, auth_key=key) as pair:
        bundle = await joined(pair, pair.peer, 2)
        host, port = pair.decode.endpoint.removeprefix("tcp://").split(":")
        with pytest.raises(KvTransferFailed, match="join a session that is not here"):
            await pair.prefill._reach((host, int(port)), TIMEOUT_S, striped=True, token=b"guess" * 6)
        with pytest.raises(KvTransferFailed, match="only a striped session"):
            await pair.prefill._reach((host, int(port)), TIMEOUT_S, token=bundle.token)
        old = bundle.token
        bundle.close(KvTransferFailed("enough"))
        await until(lambda: not pair.decode._sessions)
        with pytest.raises(KvTransferFailed, match="join a session that is not here"):
            await pair.prefill._reach((host, int(port)), TIMEOUT_S, striped=True, token=old)
        assert len(old) == 32


async def test_a_session_has_so_many_links_and_no_more():
    async with links_pair(links=16) as pair:
        bundle = await joined(pair, pair.peer, 16)
        host, port = pair.decode.endpoint.removeprefix("tcp://").split(":")
        sock = await pair.prefill._reach((host, int(port)), TIMEOUT_S, striped=True, token=bundle.token)
        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""  # hung up
        sock.close()
        await push_over(pair, pair.peer)
        assert all_same(pair)


async def test_closing_either_side_ends_all_links():
    for side in ("prefill", "decode"):
        async with links_pair(links=3) as pair:
            await joined(pair, pair.peer, 3)
            await getattr(pair, side).close()
            await until(lambda pair=pair: not pair.prefill._sessions and not pair.decode._sessions)  # type: ignore[misc]
            assert pair.decode._door._bundles == {}
            assert pair.decode._door.num_connections == 0


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def harm(proxies: list[Proxy], draw: random.Random) -> None:
    """Now and then cut, hold or change something, on one link at a time or on several."""
    while True:
        await asyncio.sleep(draw.random() * 0.05)
        proxy = draw.choice(proxies)
        match draw.randrange(4):
            case 0:
                proxy.cut()
            case 1:
                proxy.flip_at = proxy.passed + draw.randrange(SLAB)
            case 2:
                proxy.hold_at = proxy.passed + draw.randrange(SLAB)
            case 3:
                proxy.released.set()
                proxy.released.clear()


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_to_links_no_byte_is_wrong_and_nothing_is_left(seed: int):
    draw = random.Random(seed)
    num_fds = num_descriptors()
    succeeded = 0
    async with links_pair(24, stall_s=1.0) as pair, proxied_links(pair, 3) as (proxies, peer):
        harmed = proxies[seed % 2 :]  # with an odd seed one link stays well
        nemesis = asyncio.create_task(harm(harmed, draw))
        for number in range(12):
            pair.target.buffer[:] = bytes(pair.target.buffer.nbytes)
            arrived = len(pair.role.arrived)
            with contextlib.suppress(KvError):
                await push_over(pair, peer, f"r{number}")
                assert all_same(pair)
                succeeded += 1
            if len(pair.role.arrived) > arrived:
                assert all_same(pair)
            pair.decode.revoke(f"r{number}", 1)
            await asyncio.sleep(0)
        nemesis.cancel()
        await asyncio.gather(nemesis, return_exceptions=True)
        for proxy in proxies:
            proxy.released.set()
        await until(lambda: pair.prefill.num_streams == pair.decode.num_streams == 0)
    assert succeeded >= (10 if seed % 2 else 1)
    assert pair.prefill._tasks == pair.decode._tasks == {}
    assert pair.decode._door.num_connections == 0
    await asyncio.sleep(0.1)
    assert num_descriptors() <= num_fds + 2


def test_what_was_received_is_what_was_granted():
    """The helper above compares whole arenas; a wrong one is seen."""
    pair = Pair(2)
    assert not all_same(pair)
    assert block_bytes(pair.source, 0) != block_bytes(pair.target, 0)
    assert peer_of(pair.decode, "x").data_endpoint == "x"
