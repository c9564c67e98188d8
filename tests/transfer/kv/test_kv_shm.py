"""Shared memory on one host: used where it can be, never trusted beyond a block's generation, closed with the peer."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kv_helpers import LAYOUT, TIMEOUT_S, Pair, make_offer, push_all, until

from transfer.errors import KvCorrupt, KvTransferFailed
from transfer.kv.arena import SHM_DIR, SHM_PREFIX, TOKEN_BYTES, HostArena, MappedArena, arena_bytes
from transfer.kv.frames import Slab
from transfer.kv.links import shm
from transfer.kv.links.connection import TcpConnection
from transfer.kv.links.context import PortContext
from transfer.kv.links.memory import checksum, copy_runs, halves, pieces
from transfer.kv.port import KvTrailer
from transfer.wire.messages import KvPeer

TRAILER = KvTrailer(num_tokens=100)


class Counted:
    """How many bytes went through sockets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        real = TcpConnection._refill

        def refill(connection: TcpConnection) -> None:
            before = connection._out_bytes
            real(connection)
            self.num_bytes += connection._out_bytes - before

        monkeypatch.setattr(TcpConnection, "_refill", refill)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


async def push(pair: Pair, peer: KvPeer, source: list[int], target: list[int]) -> Any:
    pair.role.granted = list(target)
    sender = await pair.prefill.open(peer, make_offer(len(source)), source, TIMEOUT_S)
    push_all(sender, 0, len(source))
    return await sender.commit(TRAILER, TIMEOUT_S)


async def test_on_one_host_only_names_cross_the_wire(wire: Counted):
    async with Pair(16, via="shm") as pair:
        stats = await push(pair, pair.peer, [3, 1, 2, 9, 10, 11], [15, 14, 13, 4, 5, 6])
        assert pair.same([3, 1, 2, 9, 10, 11], [15, 14, 13, 4, 5, 6])
        assert stats.num_bytes == 6 * LAYOUT.block_bytes
        assert wire.num_bytes < 10_000


@pytest.mark.parametrize("why", ["another host", "no mapping", "private arena"])
async def test_where_memory_cannot_be_shared_the_bytes_are_sent(
    why: str, wire: Counted, monkeypatch: pytest.MonkeyPatch
):
    async with Pair(4, via="tcp" if why == "private arena" else "shm") as pair:
        peer = pair.peer
        if why == "another host":
            peer = KvPeer(instance_id="decode", epoch=11, data_endpoint=pair.decode.endpoint, host_id="there")
        if why == "no mapping":
            monkeypatch.setattr("transfer.kv.arena.SHM_DIR", Path("/nonexistent"))
        if why == "private arena":
            pair.prefill._context.shm = pair.decode._context.shm = True
        await push(pair, peer, [0, 1, 2], [1, 2, 3])
        assert pair.same([0, 1, 2], [1, 2, 3])
        assert wire.num_bytes > 3 * LAYOUT.block_bytes


@pytest.mark.parametrize("summed", [True, False])
async def test_a_block_that_changes_hands_while_it_is_read_is_found(summed: bool, monkeypatch: pytest.MonkeyPatch):
    async with Pair(8, via="shm", shm_checksum=summed) as pair:
        layers = iter(range(LAYOUT.num_layers))

        def copy(*args: Any, **kwargs: Any) -> Any:
            if next(layers) == 11:
                pair.source.bump(5)
                pair.source.views(11, 5, 1)[0][:100] = bytes(100)
            return copy_runs(*args, **kwargs)

        monkeypatch.setattr(shm, "copy_runs", copy)
        with pytest.raises(KvCorrupt, match="changed hands while layer 11 was copied"):
            await push(pair, pair.peer, [4, 5, 6], [0, 1, 2])
        assert len(pair.role.failed) == 1
        assert pair.role.arrived == []


async def test_bytes_that_change_without_a_change_of_hands_are_found_by_the_checksum(monkeypatch: pytest.MonkeyPatch):
    def copy(*args: Any, **kwargs: Any) -> Any:
        pair.source.views(0, 5, 1)[0][0] ^= 1
        return copy_runs(*args, **kwargs)

    async with Pair(8, via="shm", shm_checksum=True) as pair:
        monkeypatch.setattr(shm, "copy_runs", copy)
        with pytest.raises(KvCorrupt, match="does not match its checksum"):
            await push(pair, pair.peer, [4, 5, 6], [0, 1, 2])


@pytest.mark.parametrize("runs", [((7, 2),), ((-1, 2),), ((0, 1),), ((0, 3),), ((0, 0), (0, 2)), ((0, -1), (0, 3))])
async def test_a_sender_cannot_name_memory_outside_its_arena(runs: tuple[tuple[int, int], ...]):
    async with Pair(8, via="shm") as pair:
        sender = await pair.prefill.open(pair.peer, make_offer(2), [0, 1], TIMEOUT_S)
        (session,) = pair.prefill._sessions
        slab = Slab(stream=1, layer=0, first=0, count=2, checksum=None, runs=runs, generations=bytes(16))
        session._wire.send(slab)
        await until(lambda: len(pair.role.failed) == 1)
        assert "not in its arena" in pair.role.failed[0][1]
        push_all(sender, 0, 2)
        with pytest.raises(KvTransferFailed):
            await sender.commit(TRAILER, TIMEOUT_S)


async def test_a_mapping_is_kept_for_the_connection_and_closed_with_it(monkeypatch: pytest.MonkeyPatch):
    opened: list[MappedArena] = []

    class Watched(MappedArena):
        def __init__(self, handle: Any) -> None:
            super().__init__(handle)
            opened.append(self)

    monkeypatch.setattr(shm, "MappedArena", Watched)
    async with Pair(8, via="shm") as pair:
        for _ in range(3):
            await push(pair, pair.peer, [0, 1], [2, 3])
        assert len(opened) == 1
        assert opened[0].generation(0) == 0
        await pair.prefill.close()
        await until(lambda: not pair.decode._sessions)
        with pytest.raises(ValueError, match=r"released|closed"):
            opened[0].generation(0)


def context_of(arena: HostArena) -> PortContext:
    return PortContext(instance_id="pool", epoch=1, arena=arena, host_id="here")


def test_nobody_makes_us_copy_our_own_memory():
    """A fetch tells our arena's name: naming it as the source of a put would copy what one could not ask for."""
    own, peers = HostArena(LAYOUT, 2, shared=True), HostArena(LAYOUT, 2, shared=True)
    mappings = shm.Mappings(context_of(own))
    try:
        assert mappings.get(own.handle) is None
        assert mappings.get(peers.handle) is not None
    finally:
        mappings.close()
        own.close()
        peers.close()


def test_a_peer_has_so_many_arenas_mapped_and_no_more():
    arenas = [HostArena(LAYOUT, 1, shared=True) for _ in range(shm.MAX_MAPPED + 1)]
    own = HostArena(LAYOUT, 1)
    mappings = shm.Mappings(context_of(own))
    try:
        found = [mappings.get(arena.handle) is not None for arena in arenas]
        assert found == [True] * shm.MAX_MAPPED + [False]
        assert mappings.get(arenas[0].handle) is not None, "what is mapped stays in use"
    finally:
        mappings.close()
        for arena in (own, *arenas):
            arena.close()


async def test_the_loop_runs_between_slabs():
    async with Pair(64, via="shm") as pair:
        longest = 0.0

        async def watch() -> None:
            nonlocal longest
            loop = asyncio.get_running_loop()
            while True:
                before = loop.time()
                await asyncio.sleep(0)
                longest = max(longest, loop.time() - before)

        watcher = asyncio.create_task(watch())
        await push(pair, pair.peer, list(range(64)), list(range(64)))
        watcher.cancel()
        assert pair.same(list(range(64)), list(range(64)))
        assert longest < 0.5


def test_copies_are_as_the_runs_say():
    arena, other = Pair(8).source, Pair(8).target
    total = copy_runs(
        halves(arena, 2), [(6, 2), (1, 1), (3, 2)], halves(other, 2), [(0, 1), (2, 3), (7, 1)], LAYOUT.slab_bytes,
        summed=True,
    )  # fmt: skip
    for source, target in zip([6, 7, 1, 3, 4], [0, 2, 3, 4, 7], strict=True):
        for mine, theirs in zip(arena.views(2, source, 1), other.views(2, target, 1), strict=True):
            assert bytes(mine) == bytes(theirs)
    assert bytes(other.views(2, 1, 1)[0]) == bytes(LAYOUT.slab_bytes)
    assert total == checksum(pieces(halves(other, 2), [(0, 1), (2, 3), (7, 1)], LAYOUT.slab_bytes))


def test_a_host_id_is_this_host():
    assert shm.local_host_id() == shm.local_host_id() != ""


@pytest.mark.parametrize("kind", ["pipe", "link", "short", "missing", "guessed", "other"])
def test_what_a_peer_names_is_mapped_only_when_it_is_its_arena(tmp_path: Path, kind: str) -> None:
    arena = HostArena(LAYOUT, 4, shared=True)
    assert arena.handle is not None
    MappedArena(arena.handle).close()
    changes: dict[str, object] = {"name": f"{SHM_PREFIX}{os.getpid()}-test-{kind}"}
    path, size = SHM_DIR / str(changes["name"]), arena_bytes(LAYOUT, 4) + TOKEN_BYTES
    try:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            (tmp_path / "whole").write_bytes(bytes(size - TOKEN_BYTES) + arena.handle.token)
            path.symlink_to(tmp_path / "whole")
        elif kind == "short":
            path.write_bytes(bytes(size - 1))
        elif kind == "guessed":  # names can be listed; whose memory it is, a name does not tell
            changes = {"token": b""}
        elif kind == "other":
            changes = {"token": bytes(TOKEN_BYTES)}
        with pytest.raises((KvCorrupt, OSError)):
            MappedArena(msgspec.structs.replace(arena.handle, **changes))
    finally:
        path.unlink(missing_ok=True)
        arena.close()
