"""Who is let in: so many connections and no more, handshakes in time, equal layouts; the refused are told why."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from kv_helpers import LAYOUT, TIMEOUT_S, Pair, make_arena, make_fetch, make_offer, peer_of, push, until

from transfer.errors import ConfigError, KvTransferFailed, ProtocolError
from transfer.kv.links import door
from transfer.kv.links.auth import opener_handshake
from transfer.kv.links.sockets import shake
from transfer.kv.links.tcp import TcpKvPort


@contextlib.asynccontextmanager
async def guest(pair: Pair, address: str = "127.0.0.1", *, shaken: bool = True) -> AsyncIterator[socket.socket]:
    """A connection to the pair's receiver from this address; shaken: with its handshake done."""
    host, port = pair.decode.endpoint.removeprefix("tcp://").split(":")
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.bind((address, 0))
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        if shaken:
            await shake(sock, opener_handshake(None))
        yield sock


async def test_a_port_has_so_many_connections_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "MAX_CONNECTIONS", 3)
    async with Pair(4) as pair:
        async with guest(pair), guest(pair, "127.0.0.2"), guest(pair, "127.0.0.3"):
            with pytest.raises(KvTransferFailed, match="turned us away: decode has 3 KV connections open"):
                await pair.prefill.open(pair.peer, make_offer(1), [0], TIMEOUT_S)
            assert pair.decode._door.num_connections == 3
        await until(lambda: pair.decode._door.num_connections == 0)
        await push(pair, [0], [1])
        assert pair.same([0], [1])


async def test_one_address_cannot_take_them_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "MAX_CONNECTIONS_PER_ADDRESS", 2)
    async with Pair(4) as pair, guest(pair, "127.0.0.2"), guest(pair, "127.0.0.2"):
        with pytest.raises(ProtocolError, match=r"has 2 KV connections open from 127\.0\.0\.2; close idle ones"):
            async with guest(pair, "127.0.0.2"):
                pass
        await push(pair, [0], [1])  # another address
        assert pair.same([0], [1])


async def test_silent_connections_count_too_and_refusals_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(door, "MAX_TURNED_AWAY", 2)
    async with Pair(4) as pair, guest(pair, shaken=False):
        await until(lambda: pair.decode._door.num_connections == 1)
        async with guest(pair, shaken=False), guest(pair, shaken=False):
            await until(lambda: pair.decode._door._refusing == 2)
            async with guest(pair, shaken=False) as sock:
                assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""  # no word for it
        await until(lambda: pair.decode._door._refusing == 0)
        assert pair.decode._door.num_connections == 1


async def test_a_handshake_has_a_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "CONNECT_S", 0.2)
    async with Pair(4) as pair, guest(pair, shaken=False) as sock:
        await until(lambda: pair.decode._door.num_connections == 1)
        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
        assert pair.decode._door.num_connections == 0
        assert len(pair.decode._tasks) == 1  # it accepts


async def test_closing_leaves_no_connection_counted():
    async with Pair(4) as pair, guest(pair), guest(pair, shaken=False):
        await push(pair, [0], [1])
        await until(lambda: pair.decode._door.num_connections == 3)
        await pair.decode.close()
        assert pair.decode._door.num_connections == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"links": 0}, "0 links on each of 1 hosts"),
        ({"links": 9, "host": "127.0.0.1,127.0.0.2"}, "9 links on each of 2 hosts; a session may have 1 to 16"),
        ({"host": "127.0.0.1,127.0.0.2", "advertise": "a"}, "2 hosts to listen for KV on, but 1 to advertise"),
        ({"host": "127.0.0.1,10.0.0.1"}, r"listening for KV on 10\.0\.0\.1 needs an auth key"),
    ],
)
def test_settings_that_cannot_be_are_told(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        TcpKvPort(instance_id="x", epoch=1, arena=make_arena(1), **options)


OTHERS = [("block_size", 32), ("num_kv_heads", 6), ("head_dim", 128), ("dtype", "bfloat16"), ("num_layers", 28),
          ("rope", "theta=500000")]  # fmt: skip


@pytest.mark.parametrize("via", ["tcp", "shm"])
@pytest.mark.parametrize(("name", "value"), OTHERS)
async def test_sides_of_unequal_layout_are_told_what_differs(via: str, name: str, value: Any):
    """Another block size, tensor-parallel share of heads, dtype: no KV moves, in either direction."""
    other = make_arena(4, layout=msgspec.structs.replace(LAYOUT, **{name: value}), shared=via == "shm")
    async with Pair(4, via=via) as pair:
        port = TcpKvPort(instance_id="other", epoch=7, arena=other, host_id="here", shm=via == "shm")
        words = f"another KV layout: {name} {value} against {getattr(LAYOUT, name)}; only equal layouts exchange KV"
        with pytest.raises(KvTransferFailed, match=words):
            await port.open(peer_of(pair.decode), make_offer(1), [0], TIMEOUT_S)
        with pytest.raises(KvTransferFailed, match=words):
            await port.fetch(peer_of(pair.decode), make_fetch([b"x" * 32]), [0], TIMEOUT_S)
        assert pair.role.offered == pair.role.wanted == []
        await port.close()
    other.close()
