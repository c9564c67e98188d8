"""The in-process network in virtual time: what it costs, and that under any faults KV is right or reported, once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from kv_helpers import (
    FINGERPRINT,
    TIMEOUT_S,
    TINY,
    RecordingRole,
    block_bytes,
    make_arena,
    make_fetch,
    make_offer,
    peer_of,
    push_all,
)

from transfer.actors.clock import run_virtual
from transfer.errors import ConfigError, KvError, KvTransferFailed
from transfer.kv.links.inproc import InprocKvNetwork, KvFaults
from transfer.kv.port import KvTrailer
from transfer.wire.messages import KvPeer

NUM_BLOCKS = 32
NAMES = [bytes([number]) * 32 for number in range(6)]
TRAILER = KvTrailer(num_tokens=9)


class Net:
    """A prefill and a decode instance on one network; decode also holds `NAMES` in its blocks 24..29."""

    def __init__(self, seed: int = 0, *, window_bytes: int = 4096, stall_s: float = 10.0, **options: Any) -> None:
        self.network = InprocKvNetwork(seed, **options)
        self.source = make_arena(NUM_BLOCKS, layout=TINY, seed=1)
        self.target = make_arena(NUM_BLOCKS, layout=TINY, seed=2)
        self.role = RecordingRole(range(24))
        self.role.pool = {name: 24 + number for number, name in enumerate(NAMES)}
        common = {"window_bytes": window_bytes, "slab_bytes": 256, "stall_s": stall_s, "fingerprint": FINGERPRINT}
        self.prefill = self.network.port(instance_id="prefill", epoch=7, arena=self.source, **common)
        self.decode = self.network.port(
            instance_id="decode", epoch=11, arena=self.target, delegate=self.role, **common
        )  # fmt: skip

    async def __aenter__(self) -> Net:
        await self.prefill.start()
        await self.decode.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(60.0)
        assert self.prefill.num_streams == self.decode.num_streams == 0
        await self.prefill.close()
        await self.decode.close()

    async def push(self, count: int, **changes: Any) -> Any:
        sender = await self.prefill.open(
            peer_of(self.decode), make_offer(count, **changes), list(range(count)), TIMEOUT_S
        )  # fmt: skip
        for layer in range(TINY.num_layers):
            sender.push(layer, 0, count)
            await asyncio.sleep(0)
        return await sender.commit(TRAILER, 100.0)


def test_a_push_arrives_and_costs_what_the_network_says():
    async def main() -> None:
        async with Net(latency_s=0.5, bytes_per_s=1000.0) as net:
            stats = await net.push(8)
            assert stats.num_bytes == 8 * TINY.block_bytes
            wire_s = stats.num_bytes / 1000.0
            assert wire_s + 1.0 < stats.transfer_s < 1.6 * wire_s + 3.0
            assert all(block_bytes(net.source, i) == block_bytes(net.target, i) for i in range(8))
            assert len(net.role.arrived) == 1

    run_virtual(main())


def test_progress_is_told_about_once_a_second():
    async def main() -> None:
        async with Net(bytes_per_s=200.0) as net:
            stats = await net.push(24)  # 9 slabs, each on its way for more than a second
            assert 6 <= len(net.role.progress) <= min(9, stats.transfer_s)

    run_virtual(main())


def test_a_fetch_arrives():
    async def main() -> None:
        async with Net(latency_s=0.01) as net:
            count = await net.prefill.fetch(peer_of(net.decode), make_fetch(NAMES), [9, 8, 7, 3, 2, 1], TIMEOUT_S)
            assert count == 6
            assert block_bytes(net.source, 9) == block_bytes(net.target, 24)
            assert block_bytes(net.source, 1) == block_bytes(net.target, 29)
            await asyncio.sleep(1.0)
            assert len(net.role.served) == 1

    run_virtual(main())


async def storm(seed: int, faults: KvFaults) -> list[str]:
    """Pushes and fetches side by side under faults; what became of each, after checking that none was wrong."""
    rng = random.Random(seed)
    outcomes: list[str] = []
    async with Net(seed, latency_s=0.01, bytes_per_s=50_000.0, stall_s=2.0, window_bytes=200, faults=faults) as net:

        async def one_push(number: int) -> None:
            await asyncio.sleep(rng.random())
            try:
                await net.push(2, request_id=f"push{number}")
            except KvError as error:
                outcomes.append(f"push{number} {type(error).__name__}")
            else:
                outcomes.append(f"push{number} ok")

        async def one_fetch(number: int) -> None:
            await asyncio.sleep(rng.random())
            mine = [25 + number]
            try:
                count = await net.prefill.fetch(peer_of(net.decode), make_fetch(NAMES[:1]), mine, TIMEOUT_S)
            except KvError as error:
                outcomes.append(f"fetch{number} {type(error).__name__}")
            else:
                assert count == 1
                assert block_bytes(net.source, mine[0]) == block_bytes(net.target, 24)
                outcomes.append(f"fetch{number} ok")

        await asyncio.gather(*map(one_push, range(10)), *map(one_fetch, range(4)))
        await asyncio.sleep(30.0)
        check(net, outcomes)
    return outcomes


def check(net: Net, outcomes: list[str]) -> None:
    ends = Counter(offer.request_id for offer, *_ in [*net.role.arrived, *net.role.failed])
    granted = [offer.request_id for offer in net.role.offered]
    assert ends == Counter(granted), "every push that was granted ends once"
    arrived = {offer.request_id for offer, _ in net.role.arrived}
    at = {name: 2 * number for number, name in enumerate(granted)}
    for name in arrived:
        for step in (0, 1):
            assert block_bytes(net.target, at[name] + step) == block_bytes(net.source, step)
    assert {line.split()[0] for line in outcomes if line.endswith("ok") and line.startswith("push")} <= arrived
    assert Counter(map(id, net.role.served)) == Counter(map(id, net.role.wanted)), "every pin is released once"


FAULTS = {
    "none": KvFaults(),
    "delays": KvFaults(delay=0.1, delay_s=0.5),
    "repeats": KvFaults(duplicate=0.5),
    "changed bytes": KvFaults(corrupt=0.02),
    "lost connections": KvFaults(lose=0.02),
    "all": KvFaults(lose=0.005, duplicate=0.2, corrupt=0.005, delay=0.05, delay_s=3.0),
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", FAULTS)
def test_under_faults_kv_is_right_or_reported(name: str, seed: int):
    outcomes = run_virtual(storm(seed, FAULTS[name]))
    assert len(outcomes) == 14
    if name in ("none", "delays", "repeats"):
        assert all(line.endswith("ok") for line in outcomes)
    assert run_virtual(storm(seed, FAULTS[name])) == outcomes, "the same seed gives the same run"


def test_the_faults_do_happen():
    kinds = Counter(
        line.split()[1] for seed in range(12) for line in run_virtual(storm(seed, FAULTS["changed bytes"]))
    )  # fmt: skip
    assert kinds["KvCorrupt"] > 5
    assert kinds["ok"] > 5


@pytest.mark.parametrize("how", ["cut", "crash"])
def test_a_lost_instance_is_noticed_on_both_sides(how: str):
    async def main() -> None:
        async with Net(bytes_per_s=100.0, latency_s=0.1) as net:
            task = asyncio.create_task(net.push(20))
            await asyncio.sleep(12.0)
            assert net.decode.num_streams == 1
            assert block_bytes(net.target, 0)[:16] == block_bytes(net.source, 0)[:16]
            getattr(net.network, how)("decode")
            with pytest.raises(KvTransferFailed):
                await task
            assert len(net.role.failed) == 1
            before = bytes(net.target.buffer)
            await asyncio.sleep(30.0)
            assert bytes(net.target.buffer) == before
            if how == "cut":
                await net.prefill.open(peer_of(net.decode), make_offer(0, request_id="r2"), [], TIMEOUT_S)
                net.network.cut("prefill")
            else:
                with pytest.raises(KvTransferFailed, match="nobody is there"):
                    await net.push(4)
                again = net.network.port(instance_id="decode", epoch=12, arena=net.target)
                await again.start()
                await again.close()

    run_virtual(main())


def test_a_name_is_taken_once():
    async def main() -> None:
        async with Net() as net:
            twin = net.network.port(instance_id="decode", epoch=12, arena=net.target)
            with pytest.raises(ConfigError, match="is on the network already"):
                await twin.start()
            await twin.close()
            await net.push(1)

    run_virtual(main())


def test_a_closed_port_neither_connects_nor_is_found():
    async def main() -> None:
        async with Net() as net:
            stranger = KvPeer(instance_id="x", epoch=1, data_endpoint="inproc://x", host_id="")
            with pytest.raises(KvTransferFailed, match="nobody is there"):
                await net.prefill.open(stranger, make_offer(0), [], TIMEOUT_S)
            await net.prefill.close()
            with pytest.raises(KvTransferFailed, match="is closed"):
                await net.push(1)

    run_virtual(main())


def test_a_receiver_that_is_gone_for_hours_fails_the_push_in_stall_time():
    async def main() -> None:
        async with Net(stall_s=10.0, latency_s=0.01) as net:
            sender = await net.prefill.open(peer_of(net.decode), make_offer(20), list(range(20)), TIMEOUT_S)
            net.network.latency_s = 4000.0
            push_all(sender, 0, 20, TINY)
            started = asyncio.get_running_loop().time()
            with pytest.raises(KvTransferFailed, match="was silent"):
                await sender.commit(TRAILER, 3600.0)
            assert 9.0 < asyncio.get_running_loop().time() - started < 13.0
            net.network.cut("prefill")

    run_virtual(main(), limit_s=20_000.0)
