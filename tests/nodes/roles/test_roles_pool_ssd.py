"""A kv_pool instance with an SSD tier in a fleet: fetched from, asked, told to copy, restarted; its feed stays true."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nodes.engines.emulated import emulated_layout
from nodes.hardware import preset
from nodes.instance import InstanceActor, InstanceSpec, PoolMemory
from nodes.making import engine_maker
from nodes.options import parse_options
from nodes.pool.keeper import Keeper, KeeperTimes
from nodes.pool.ssd import SsdConfig, pool_directory
from nodes.roles.kv_pool import PoolRole
from transfer.actors.supervision import Supervisor
from transfer.errors import ConfigError, KvTransferFailed
from transfer.kv.arena import HostArena
from transfer.kv.links.tcp import TcpKvPort
from transfer.kv.port import KvAnswer, KvAsk, KvAskKind, KvFetch, KvKind, KvOffer, KvTrailer
from transfer.terms import Role
from transfer.wire.inproc import InprocNetwork
from transfer.wire.messages import (
    CacheEvents,
    CacheSnapshotWanted,
    Heartbeat,
    Hello,
    KvPeer,
    Message,
    Replicate,
    Replicated,
    Welcome,
)

LAYOUT = emulated_layout(16)
ROOT = b"r" * 32


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


def content(h: bytes) -> bytes:
    return (h * LAYOUT.block_bytes)[: LAYOUT.block_bytes]


class Nodes:
    """Real instances and ports over loopback, a control plane that only listens, and one client with an arena."""

    def __init__(self, directory: Path, *, num_blocks: int = 64, ssd_blocks: int = 640) -> None:
        self.directory, self.num_blocks, self.ssd_blocks = directory, num_blocks, ssd_blocks
        self.network = InprocNetwork(0)
        self.heard: list[tuple[str, Message]] = []
        self.hellos: dict[str, Hello] = {}
        self.actors: dict[str, InstanceActor] = {}
        self.control = self.network.router(on_message=self._on_message, on_peer=lambda *_: None)
        self.arena = HostArena(LAYOUT, 128)
        self.port = TcpKvPort(instance_id="client", epoch=1, arena=self.arena, host_id="other")
        self._num = itertools.count(1)
        self._supervisor = Supervisor("nodes", lambda name, error: None)

    async def __aenter__(self) -> Nodes:
        await self.control.start()
        await self.port.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for actor in self.actors.values():
            assert actor.role is not None
            assert actor.role.load().leaked_blocks == 0
        await self._supervisor.stop(10.0)
        await self.port.close()
        self.arena.close()

    async def start(self, instance: str, *, ssd: bool = True) -> None:
        config = SsdConfig(pool_directory(self.directory, instance), self.ssd_blocks) if ssd else None

        async def make() -> PoolMemory:
            return PoolMemory(LAYOUT, self.num_blocks, preset("CPU"), ssd=config)

        spec = InstanceSpec(
            instance_id=instance, role=Role.KV_POOL, host_id="host", make_engine=make,
            make_port=lambda instance_id, epoch, arena: TcpKvPort(
                instance_id=instance_id, epoch=epoch, arena=arena, host_id="host"
            ),
            make_endpoint=lambda instance_id, on_message, on_peer, on_bad: self.network.dealer(
                instance_id, on_message=on_message, on_peer=on_peer, on_bad=on_bad
            ),
            give_up=lambda sentence, status: None,
        )  # fmt: skip

        def life() -> InstanceActor:
            self.actors[instance] = InstanceActor(spec)
            return self.actors[instance]

        self.hellos.pop(instance, None)
        self._supervisor.spawn(instance, life)
        await self.until(lambda: instance in self.hellos and bool(self.of(Heartbeat, instance)), f"{instance} joined")

    async def stop(self, instance: str) -> None:
        await self._supervisor.stop_actor(instance, 10.0)
        del self.actors[instance]
        self.heard = [(who, message) for who, message in self.heard if who != instance]

    def role(self, instance: str) -> PoolRole:
        role = self.actors[instance].role
        assert isinstance(role, PoolRole)
        return role

    def keeper(self, instance: str) -> Keeper:
        return self.role(instance).keeper

    def peer(self, instance: str) -> KvPeer:
        hello = self.hellos[instance]
        return KvPeer(instance_id=instance, epoch=hello.epoch, data_endpoint=hello.data_endpoint, host_id="host")

    def of(self, kind: type[Message], instance: str) -> list[Any]:
        return [message for who, message in self.heard if who == instance and isinstance(message, kind)]

    def directory_of(self, instance: str) -> tuple[set[bytes], set[bytes]]:
        """What the control plane believes is in memory and on SSD only, from CacheEvents alone."""
        memory, ssd = set[bytes](), set[bytes]()
        events: list[CacheEvents] = self.of(CacheEvents, instance)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        for event in events:
            if event.snapshot:
                memory, ssd = set(), set()
            for hashes in (event.removed, event.stored, event.stored_ssd):
                memory -= set(hashes)
                ssd -= set(hashes)
            memory |= set(event.stored)
            ssd |= set(event.stored_ssd)
        return memory, ssd

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(15.0):
                while not condition():  # noqa: ASYNC110  (many things are waited for)
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"{what} did not come") from None

    async def put(self, instance: str, *numbers: int) -> None:
        hashes = tuple(name(number) for number in numbers)
        for block, h in enumerate(hashes):
            k, v = self.arena.views(0, block, 1)
            k[:], v[:] = content(h)[: LAYOUT.slab_bytes], content(h)[LAYOUT.slab_bytes :]
        peer = self.peer(instance)
        offer = KvOffer(
            kind=KvKind.STORE, request_id=f"w{next(self._num)}", generation=0, source="client", source_epoch=1,
            target_epoch=peer.epoch, fingerprint=ROOT, first_block=0, num_blocks=len(hashes), hashes=hashes,
        )  # fmt: skip
        sender = await self.port.open(peer, offer, list(range(len(hashes))), 10.0)
        sender.push(0, 0, len(hashes))
        await sender.commit(KvTrailer(num_tokens=16 * len(hashes)), 10.0)

    async def get(self, instance: str, *numbers: int) -> int:
        """How many leading blocks came; their bytes must be right."""
        hashes, peer = tuple(name(number) for number in numbers), self.peer(instance)
        fetch = KvFetch(request_id=f"r{next(self._num)}", target_epoch=peer.epoch, fingerprint=ROOT, hashes=hashes)
        count = await self.port.fetch(peer, fetch, list(range(len(hashes))), 10.0)
        for block, h in enumerate(hashes[:count]):
            assert b"".join(map(bytes, self.arena.views(0, block, 1))) == content(h)
        return count

    async def ask(self, instance: str, kind: KvAskKind, *numbers: int, pin: str = "", ttl_s: float = 0.0) -> KvAnswer:
        ask = KvAsk(kind=kind, source="client", target_epoch=0, hashes=tuple(map(name, numbers)), name=pin, ttl_s=ttl_s)
        return await self.port.ask(self.peer(instance), ask, 10.0)

    async def at_rest(self, instance: str) -> None:
        keeper = self.keeper(instance)
        await self.until(lambda: not keeper.busy, "the end of all moves")
        assert keeper.check() == 0

    def _on_message(self, instance: str, message: Message) -> None:
        self.heard.append((instance, message))
        if isinstance(message, Hello):
            self.hellos[instance] = message
            self.control.send(instance, Welcome(control_epoch=1, role=message.role, heartbeat_s=0.05, lease_s=5.0))


async def test_more_than_memory_holds_is_fetched_from_ssd_and_the_feed_tells_the_tier(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        await nodes.start("k0")
        for start in (0, 50, 100):  # an orderly end writes all that is in memory to SSD
            await nodes.put("k0", *range(start, start + 50))
            await nodes.stop("k0")
            await nodes.start("k0")
        store = nodes.role("k0").store
        assert (store.cached_blocks, store.ssd_blocks) == (0, 150)
        for start in range(0, 150, 30):
            assert await nodes.get("k0", *range(start, start + 30)) == 30
        await nodes.at_rest("k0")
        assert 0 < store.cached_blocks <= 60  # the high watermark
        ssd = set(store.ssd_hashes())
        assert len(ssd) >= 90
        await nodes.until(lambda: nodes.directory_of("k0") == (set(store.hashes()), ssd), "a true directory")
        nodes.control.send("k0", CacheSnapshotWanted(epoch=nodes.hellos["k0"].epoch))
        await nodes.until(lambda: nodes.of(CacheEvents, "k0")[-1].snapshot, "a snapshot")
        assert nodes.directory_of("k0") == (set(store.hashes()), ssd)
        load = nodes.role("k0").load()
        assert (load.leaked_blocks, load.ssd_blocks, load.ssd_capacity_blocks) == (0, store.ssd_blocks, 640)


async def test_a_restarted_pool_is_warm_from_ssd(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        await nodes.start("k0")
        await nodes.put("k0", *range(50))
        await nodes.stop("k0")
        await nodes.start("k0")
        await nodes.until(lambda: len(nodes.directory_of("k0")[1]) == 50, "the directory of the new life")
        assert await nodes.get("k0", *range(50)) == 50
        assert (await nodes.ask("k0", KvAskKind.STATS)).stats["ssd_found_num_blocks"] == 50


async def test_questions_are_answered(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        await nodes.start("k0")
        await nodes.put("k0", 1, 2, 3)
        answer = await nodes.ask("k0", KvAskKind.LOOKUP, 1, 2, 9, 3)
        assert (answer.num_blocks, answer.epoch) == (2, nodes.hellos["k0"].epoch)
        assert (await nodes.ask("k0", KvAskKind.PIN, 1, 2, pin="session", ttl_s=60.0)).num_blocks == 2
        stats = (await nodes.ask("k0", KvAskKind.STATS)).stats
        assert (stats["held_blocks"], stats["dram_blocks"], stats["leaked_blocks"]) == (2.0, 3.0, 0.0)
        for _ in range(2):
            await nodes.ask("k0", KvAskKind.UNPIN, pin="session")
        assert nodes.role("k0").store.pinned_blocks == 0
        for pin, ttl_s, sentence in (
            ("p", 0.0, "ttl_s must be above 0"), ("p", 1e9, "at most 86400 s"), ("", 1.0, "a pin needs a name"),
        ):  # fmt: skip
            with pytest.raises(KvTransferFailed, match=sentence):
                await nodes.ask("k0", KvAskKind.PIN, 1, pin=pin, ttl_s=ttl_s)


async def test_pins_end_by_themselves(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        await nodes.start("k0", ssd=False)
        await nodes.put("k0", 1)
        await nodes.ask("k0", KvAskKind.PIN, 1, pin="p", ttl_s=0.2)
        assert nodes.role("k0").store.pinned_blocks == 1
        await nodes.until(lambda: nodes.role("k0").store.pinned_blocks == 0, "the end of the pin")


async def test_a_late_put_and_what_has_its_name_end_together_and_the_blocks_return(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        await nodes.start("k0", ssd=False)
        keeper, store, peer = nodes.keeper("k0"), nodes.role("k0").store, nodes.peer("k0")
        keeper._times = KeeperTimes(write_s=0.2)
        other = TcpKvPort(instance_id="other", epoch=1, arena=nodes.arena, host_id="other")
        for number, (port, source) in enumerate(((nodes.port, "client"), (other, "other"))):
            offer = KvOffer(
                kind=KvKind.STORE, request_id="same", generation=0, source=source, source_epoch=1,
                target_epoch=peer.epoch, fingerprint=ROOT, first_block=0, num_blocks=1, hashes=(name(number),),
            )  # fmt: skip
            await port.open(peer, offer, [number], 5.0)
            keeper._times = KeeperTimes(write_s=60.0)  # only the first is late
        assert store.writing_blocks == 2
        await nodes.until(lambda: store.writing_blocks == 0, "the end of both")
        assert keeper.check() == 0
        await nodes.put("k0", 0, 1)
        assert await nodes.get("k0", 0, 1) == 2
        await other.close()


@dataclass
class _Order:
    nodes: Nodes
    numbers: tuple[int, ...]
    source: str = "k0"
    target: str = "k1"
    fields: dict[str, Any] = field(default_factory=dict)

    async def run(self, order: str) -> Replicated:
        nodes = self.nodes
        message = Replicate(
            name=order, epoch=self.fields.get("epoch", nodes.hellos[self.source].epoch), fingerprint=ROOT,
            hashes=tuple(map(name, self.numbers)), target=self.fields.get("peer") or nodes.peer(self.target),
        )  # fmt: skip
        nodes.control.send(self.source, message)
        nodes.control.send(self.source, message)  # repeated while it is under way: answered once

        def answers() -> list[Replicated]:
            return [answer for answer in nodes.of(Replicated, self.source) if answer.name == order]

        await nodes.until(lambda: bool(answers()), f"the answer to {order}")
        return answers()[0]


async def test_a_hot_prefix_is_copied_to_another_pool_also_from_ssd(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        await nodes.start("k0")
        await nodes.put("k0", *range(30))
        await nodes.stop("k0")
        await nodes.start("k0")
        await nodes.start("k1")
        assert nodes.role("k0").store.cached_blocks == 0
        answer = await _Order(nodes, (*range(30), 99)).run("hot-1")
        assert (answer.num_blocks, answer.reason, answer.epoch) == (30, "", nodes.hellos["k0"].epoch)
        assert await nodes.get("k1", *range(30)) == 30
        assert nodes.role("k0").store.pinned_blocks == 0
        again = await _Order(nodes, tuple(range(30))).run("hot-2")  # all is there: nothing travels, the answer is true
        assert again.num_blocks == 30


async def test_a_copy_that_cannot_be_made_is_answered_with_a_sentence(tmp_path: Path) -> None:
    async with Nodes(tmp_path) as nodes:
        await nodes.start("k0", ssd=False)
        await nodes.start("k1", ssd=False)
        await nodes.put("k0", 1)
        missing = await _Order(nodes, (7,)).run("missing")
        assert (missing.num_blocks, missing.reason) == (0, "none of the blocks is here any more")
        old = await _Order(nodes, (1,), fields={"epoch": 5}).run("old")
        assert (old.num_blocks, "was restarted" in old.reason) == (0, True)
        nowhere = KvPeer(instance_id="k9", epoch=1, data_endpoint="tcp://127.0.0.1:1", host_id="host")
        lost = await _Order(nodes, (1,), fields={"peer": nowhere}).run("lost")
        assert (lost.num_blocks, bool(lost.reason)) == (0, True)
        assert nodes.role("k0").store.pinned_blocks == 0


# --- options --------------------------------------------------------------------------------------------------------


async def test_ssd_options_give_each_pool_a_directory_of_its_own(tmp_path: Path) -> None:
    argv = ["--control", "tcp://127.0.0.1:1", "--engine", "emulated", "--instance", "k0=kv_pool"]
    argv += ["--instance", "k/1=kv_pool", "--ssd-dir", str(tmp_path), "--model", "llama-3.1-8b", "--ssd-gib", "1"]
    options = parse_options(argv, {})
    first, second = [await engine_maker(options, one)() for one in options.instances]
    assert isinstance(first, PoolMemory)
    assert isinstance(second, PoolMemory)
    assert first.ssd is not None
    assert second.ssd is not None
    assert first.ssd.directory == tmp_path / "pool-k0"
    assert second.ssd.directory == tmp_path / "pool-k%2F1"
    assert first.ssd.num_blocks == (1 << 30) // (131_072 * 16)  # what a real block would take
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240
    without = parse_options(argv[:6], {"PHASEPLANE_SSD_GIB": "2", "PHASEPLANE_SSD_DIR": str(tmp_path)})
    assert (without.ssd_dir, without.ssd_gib) == (str(tmp_path), 2.0)
    plain = await engine_maker(parse_options(argv[:6], {}), options.instances[0])()
    assert isinstance(plain, PoolMemory)
    assert plain.ssd is None
    with pytest.raises(ConfigError, match="give --ssd-dir too"):
        parse_options([*argv[:6], "--ssd-gib", "2"], {})
