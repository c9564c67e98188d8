"""A pool's client when something fails: restarts, damage, silence, refusals, cancelled calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kv_helpers import until
from kv_pool_client_harness import BLOCK, FINGERPRINT, LAYOUT, Pool, a_pool, client_of, data, keys, through_proxy

from transfer.errors import InvalidValue, KvTransferFailed
from transfer.keys import load_data_key, make_keys
from transfer.kv.client import KvPoolClient
from transfer.kv.staging import opaque_layout


async def test_a_restarted_pool_is_met_again_and_the_call_repeated() -> None:
    async with a_pool() as pool, client_of(pool) as client:
        await client.put(keys(5), data(5))
        await pool.restart()
        assert await client.get(keys(5), bytearray(5 * BLOCK)) == 0
        await pool.restart()
        assert await client.put(keys(5), data(5)) == 5
        await pool.stop()
        putting = asyncio.create_task(client.put(keys(3, "while away"), data(3)))
        await asyncio.sleep(0.1)
        assert not putting.done()
        await pool.start()
        assert await putting == 3


async def test_a_connection_that_breaks_in_a_put_is_made_again() -> None:
    async with a_pool() as pool, through_proxy(pool, staging_bytes=64 * BLOCK) as (proxy, client):
        proxy.hold_at = proxy.passed + 9 * BLOCK
        putting = asyncio.create_task(client.put(keys(40), data(40)))
        await until(lambda: pool.role.store.writing_blocks == 40 and proxy.hold_at is None)
        proxy.cut()
        assert await putting == 40
        into = bytearray(40 * BLOCK)
        assert await client.get(keys(40), into) == 40
        assert into == data(40)


async def test_bytes_damaged_on_the_way_are_sent_again_and_never_stored() -> None:
    async with a_pool() as pool, through_proxy(pool) as (proxy, client):
        proxy.flip_at = proxy.passed + 2 * BLOCK
        assert await client.put(keys(4), data(4)) == 4
        assert proxy.passed > 7 * BLOCK
        into = bytearray(4 * BLOCK)
        assert await client.get(keys(4), into) == 4
        assert into == data(4)


async def test_a_silent_pool_is_given_up_at_the_deadline() -> None:
    async with a_pool() as pool, through_proxy(pool) as (proxy, client):
        proxy.hold_at = proxy.passed
        loop = asyncio.get_running_loop()
        started = loop.time()
        for call in (
            client.put(keys(4), data(4), timeout_s=0.3),
            client.get(keys(4), bytearray(4 * BLOCK), timeout_s=0.3),
            client.lookup(keys(4), timeout_s=0.3),
        ):
            with pytest.raises(KvTransferFailed):
                await call
        assert loop.time() - started < 3.0
        assert client._staging is not None
        assert client._staging.free_blocks == client._staging.num_blocks


@pytest.mark.parametrize("what", ["get", "put", "lent", "waiting"])
async def test_calls_under_way_fail_in_a_sentence_when_the_client_is_closed(what: str) -> None:
    async with a_pool() as pool, through_proxy(pool, staging_bytes=16 * BLOCK) as (proxy, client):
        await client.put(keys(8), data(8))
        proxy.hold_at = proxy.passed
        assert client._staging is not None
        if what == "waiting":
            await client._staging.take(16, 1.0)

        async def call() -> None:
            if what == "get":
                await client.get(keys(8), bytearray(8 * BLOCK))
            elif what == "lent":
                async with client.reserve(3) as blocks:
                    await client.get_blocks(keys(3), blocks)
            else:
                await client.put(keys(8, "new"), data(8))

        calling = asyncio.create_task(call())
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(KvTransferFailed, match="closed"):
            await asyncio.wait_for(calling, 2.0)


async def test_no_pool_is_said_at_once() -> None:
    client = KvPoolClient("tcp://127.0.0.1:1", block_bytes=BLOCK, fingerprint=FINGERPRINT)
    with pytest.raises(KvTransferFailed, match="cannot connect"):
        await client.__aenter__()
    with pytest.raises(InvalidValue, match="closed"):
        await client.lookup(keys(1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_bytes": 2 * BLOCK}, "another KV layout: block_bytes 8192 against 4096"),
        ({"block_bytes": None, "layout": LAYOUT}, "another KV layout"),
        ({"fingerprint": b"f" * 32}, "another KV fingerprint"),
    ],
)
async def test_other_blocks_or_weights_are_refused_in_a_sentence(options: dict[str, object], words: str) -> None:
    async with a_pool(fingerprint=FINGERPRINT) as pool:
        with pytest.raises(KvTransferFailed, match=words):
            await client_of(pool, **options).__aenter__()
        async with client_of(pool):
            pass


async def test_beyond_the_key_nobody_enters(tmp_path: Path) -> None:
    make_keys(tmp_path / "a")
    make_keys(tmp_path / "b")
    async with a_pool(auth_key=load_data_key(tmp_path / "a" / "data.key")) as pool:
        for key_file in (None, tmp_path / "b" / "data.key"):
            with pytest.raises(KvTransferFailed, match="key"):
                await client_of(pool, key_file=key_file).__aenter__()
        async with client_of(pool, key_file=tmp_path / "a" / "data.key") as client:
            assert await client.put(keys(2), data(2)) == 2


async def test_a_pool_that_is_too_small_refuses_in_a_sentence() -> None:
    async with a_pool(num_blocks=4) as pool, client_of(pool) as client:
        with pytest.raises(KvTransferFailed, match="room"):
            await client.put(keys(8), data(8), timeout_s=2.0)


async def test_a_cancelled_put_leaves_neither_blocks_nor_bytes() -> None:
    size = 512 << 10
    async with a_pool(opaque_layout(size), 20) as pool, through_proxy(pool, block_bytes=size) as (proxy, client):
        proxy.hold_at = proxy.passed + 3 * size
        putting = asyncio.create_task(client.put(keys(16), data(16, size=size)))
        await until(lambda: pool.role.store.writing_blocks == 16)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        proxy.released.set()
        await until(lambda: pool.role.store.writing_blocks == 0)
        assert await client.lookup(keys(16)) == 0
        assert client._staging is not None
        assert client._staging.free_blocks == client._staging.num_blocks


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (bytes(BLOCK), "2 values of 4096 bytes"),
        ([bytes(BLOCK), bytes(1)], "2 values of 4096 bytes"),
        ([bytes(BLOCK)] * 3, "2 values of 4096 bytes"),
        (memoryview(bytes(4 * BLOCK))[::2], "contiguous"),
    ],
)
async def test_memory_that_does_not_fit_is_refused(values: object, words: str) -> None:
    async with a_pool() as pool, client_of(pool) as client:
        with pytest.raises(InvalidValue, match=words):
            await client.put(keys(2), values)  # type: ignore[arg-type]


async def test_wrong_arguments_are_refused() -> None:
    async with a_pool() as pool, client_of(pool) as client:
        with pytest.raises(InvalidValue, match="read-only"):
            await client.get(keys(1), bytes(BLOCK))
        with pytest.raises(InvalidValue, match="32 bytes"):
            await client.get([b"short"], bytearray(BLOCK))
        with pytest.raises(InvalidValue, match="keys are a list of bytes, 32 each; one of them is int"):
            await client.lookup(keys(1)[0])  # type: ignore[arg-type]
        with pytest.raises(InvalidValue, match="staging"):
            async with client.reserve(17):
                pass
        with pytest.raises(InvalidValue, match="up to 65536 keys, got 65537"):
            await client.lookup(keys(1) * 65537)
        assert await client.lookup(keys(1) * 65536) == 0
        for name in ("", "n" * 128):
            with pytest.raises(InvalidValue, match=r"a pin needs a name of 1 to \d+ characters"):
                await client.pin(name, keys(1), 1.0)
        with pytest.raises(InvalidValue, match="either layout or block_bytes"):
            client_of(pool, layout=LAYOUT)
        with pytest.raises(InvalidValue, match="fingerprint"):
            client_of(pool, fingerprint=b"")


@pytest.mark.parametrize("size", [-2, 0, 1, 4097, (512 << 10) + 2, (1 << 20) + 2])
def test_sizes_without_a_layout_are_refused(size: int) -> None:
    with pytest.raises(InvalidValue, match=f"{size} bytes"):
        opaque_layout(size)


async def test_a_lost_pool_costs_each_call_its_own_deadline_and_closing_ends_them_all() -> None:
    pool = Pool(opaque_layout(BLOCK), 8)
    await pool.start()
    async with client_of(pool, timeout_s=20.0) as client:
        await pool.stop()
        loop = asyncio.get_running_loop()
        started = loop.time()
        patient = asyncio.create_task(client.lookup(keys(1)))
        await asyncio.sleep(0.05)
        with pytest.raises(KvTransferFailed):
            await client.lookup(keys(1), timeout_s=0.2)
        assert loop.time() - started < 2.0
        assert not patient.done()
    with pytest.raises(KvTransferFailed):
        await patient
    assert loop.time() - started < 4.0
