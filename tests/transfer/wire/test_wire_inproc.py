"""The in-process network keeps the endpoint's promises, and breaks them only where it was asked to."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from transfer.actors.clock import run_virtual
from transfer.actors.ref import RemoteRef
from transfer.errors import ConfigError, MailboxFull, PeerLost, ProtocolError
from transfer.wire.endpoint import Endpoint, PeerEvent
from transfer.wire.inproc import Fate, Faults, InprocEndpoint, InprocNetwork
from transfer.wire.messages import CONTROL, Abort, Message, Released


class Life:
    """One life of an endpoint, and all that happened to it: (time, what, peer, number or error)."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, str, str, object]] = []
        self.end: InprocEndpoint

    def on_message(self, peer: str, message: Message) -> None:
        assert isinstance(message, Abort)
        self.note("message", peer, message.generation)

    def on_peer(self, peer: str, event: PeerEvent) -> None:
        self.note(event.value, peer, None)

    def on_bad(self, peer: str, error: ProtocolError) -> None:
        self.note("bad", peer, str(error))

    def note(self, what: str, peer: str, detail: object) -> None:
        self.seen.append((asyncio.get_running_loop().time(), what, peer, detail))

    def numbers(self) -> list[object]:
        return [detail for _, what, _, detail in self.seen if what == "message"]

    def events(self) -> list[str]:
        return [what for _, what, _, _ in self.seen if what != "message"]

    def send(self, peer: str, *numbers: int) -> None:
        for number in numbers:
            self.end.send(peer, Abort(request_id="r", generation=number, reason=""))


def router(network: InprocNetwork) -> Life:
    life = Life()
    life.end = network.router(on_message=life.on_message, on_peer=life.on_peer, on_bad=life.on_bad)
    return life


def dealer(network: InprocNetwork, identity: str) -> Life:
    life = Life()
    life.end = network.dealer(identity, on_message=life.on_message, on_peer=life.on_peer, on_bad=life.on_bad)
    return life


async def pair(network: InprocNetwork, identity: str = "d1") -> tuple[Life, Life]:
    control, node = router(network), dealer(network, identity)
    await control.end.start()
    await node.end.start()
    await asyncio.sleep(0.01)
    assert control.events() == node.events() == ["connected"]
    return control, node


def test_messages_keep_their_order_and_arrive_late_but_once() -> None:
    async def run() -> None:
        network = InprocNetwork(seed=1)
        control, node = await pair(network)
        network.faults.max_delay_s = 0.5
        await asyncio.sleep(0.99)
        node.send(CONTROL, *range(100))
        control.send("d1", *range(100))
        assert control.numbers() == []
        await asyncio.sleep(5.0)
        assert control.numbers() == node.numbers() == list(range(100))
        times = [time for time, what, _, _ in control.seen if what == "message"]
        assert 1.0 < times[0] < times[-1] <= 1.5 + 1e-6
        assert Counter(entry.fate for entry in network.history) == {Fate.DELIVERED: 200}
        assert {(entry.sender, entry.receiver, entry.tag) for entry in network.history} == {
            ("d1", CONTROL, "Abort"),
            (CONTROL, "d1", "Abort"),
        }

    run_virtual(run())


def test_a_seed_repeats_a_run_and_another_does_not() -> None:
    async def run(seed: int) -> list[tuple[float, str]]:
        network = InprocNetwork(seed=seed)
        _control, node = await pair(network)
        network.faults = Faults(drop=0.3, duplicate=0.3, max_delay_s=0.2, reorder=True)
        node.send(CONTROL, *range(50))
        await asyncio.sleep(5.0)
        return [(entry.time, entry.fate) for entry in network.history]

    assert run_virtual(run(7)) == run_virtual(run(7))
    assert run_virtual(run(7)) != run_virtual(run(8))


def test_drops_duplicates_and_reorder_only_where_asked_for() -> None:
    async def run() -> None:
        network = InprocNetwork(seed=3)
        control, node = await pair(network)
        await asyncio.sleep(1.0)
        network.faults.drop = 0.2
        node.send(CONTROL, *range(500))
        await asyncio.sleep(1.0)
        got = control.numbers()
        assert 350 < len(got) < 450
        assert got == sorted(got, key=int)
        control.seen.clear()
        network.faults = Faults(duplicate=0.2)
        node.send(CONTROL, *range(500))
        await asyncio.sleep(1.0)
        got = control.numbers()
        assert 550 < len(got) < 650
        assert sorted(set(got), key=int) == list(range(500))
        assert got == sorted(got, key=int)
        control.seen.clear()
        network.faults = Faults(max_delay_s=0.5, reorder=True)
        node.send(CONTROL, *range(500))
        await asyncio.sleep(1.0)
        got = control.numbers()
        assert got != list(range(500))
        assert Counter(got) == Counter(range(500))
        assert {Fate.DROPPED, Fate.DUPLICATED} < {entry.fate for entry in network.history}

    run_virtual(run())


def test_a_short_partition_only_delays() -> None:
    async def run() -> None:
        network = InprocNetwork(liveness_s=3.0)
        control, node = await pair(network)
        node.send(CONTROL, 1)
        network.partition("d1", CONTROL)
        node.send(CONTROL, 2)
        control.send("d1", 1)
        await asyncio.sleep(2.9)
        assert control.numbers() == node.numbers() == []
        network.heal()
        node.send(CONTROL, 3)
        await asyncio.sleep(5.0)
        assert control.numbers() == [1, 2, 3]
        assert node.numbers() == [1]
        assert control.events() == node.events() == ["connected"]

    run_virtual(run())


def test_a_long_partition_is_lost_on_both_sides_after_liveness_and_replays_nothing() -> None:
    async def run() -> None:
        network = InprocNetwork(liveness_s=3.0)
        control, node = await pair(network)
        cut_at = asyncio.get_running_loop().time()
        network.partition(CONTROL, "d1")
        node.send(CONTROL, 1)
        await asyncio.sleep(10.0)
        for life in (control, node):
            assert life.seen[-1][:2] == (pytest.approx(cut_at + 3.0), "lost")
            assert life.events() == ["connected", "lost"]
        with pytest.raises(PeerLost, match="not connected"):
            node.send(CONTROL, 2)
        with pytest.raises(PeerLost, match="d1 is not connected, so a Abort was not sent"):
            control.send("d1", 2)
        network.heal()
        await asyncio.sleep(1.0)
        assert control.events() == node.events() == ["connected", "lost", "connected"]
        node.send(CONTROL, 3)
        await asyncio.sleep(1.0)
        assert control.numbers() == [3]
        assert [entry.fate for entry in network.history] == [Fate.LOST, Fate.DELIVERED]

    run_virtual(run())


def test_other_links_do_not_feel_a_partition() -> None:
    async def run() -> None:
        network = InprocNetwork()
        control, _node = await pair(network)
        other = dealer(network, "d2")
        await other.end.start()
        await asyncio.sleep(0.1)
        network.partition("d1", CONTROL)
        other.send(CONTROL, 5)
        await asyncio.sleep(10.0)
        assert control.numbers() == [5]
        assert other.events() == ["connected"]
        with pytest.raises(ConfigError, match="share no link"):
            network.partition("d1", "d2")

    run_virtual(run())


def test_a_crash_is_noticed_after_liveness_and_its_last_words_may_arrive() -> None:
    async def run() -> None:
        network = InprocNetwork(liveness_s=3.0)
        control, node = await pair(network)
        node.send(CONTROL, 1)
        network.crash("d1")
        crashed_at = asyncio.get_running_loop().time()
        control.send("d1", 9)  # nobody can know yet
        await asyncio.sleep(2.5)
        assert control.numbers() == [1]
        assert control.events() == ["connected"]
        await asyncio.sleep(1.0)
        assert control.seen[-1] == (pytest.approx(crashed_at + 3.0), "lost", "d1", None)
        assert node.numbers() == []
        assert node.events() == ["connected"]
        assert sorted(entry.fate for entry in network.history) == [Fate.DELIVERED, Fate.LOST]
        with pytest.raises(PeerLost):
            node.send(CONTROL, 2)

    run_virtual(run())


def test_a_new_life_under_the_same_identity_replaces_the_old_one() -> None:
    async def run() -> None:
        network = InprocNetwork(liveness_s=3.0)
        control, node = await pair(network)
        control.send("d1", 1)
        network.crash("d1")
        again = dealer(network, "d1")
        await again.end.start()
        await asyncio.sleep(0.5)
        assert control.events() == ["connected", "lost", "connected"]
        again.send(CONTROL, 2)
        control.send("d1", 3)
        await asyncio.sleep(10.0)
        assert control.events() == ["connected", "lost", "connected"]
        assert control.numbers() == [2]
        assert again.numbers() == [3]
        assert node.numbers() == []

    run_virtual(run())


def test_a_router_that_restarts_is_rejoined_by_all() -> None:
    async def run() -> None:
        network = InprocNetwork(liveness_s=3.0)
        control, node = await pair(network)
        with pytest.raises(ConfigError, match="in use"):
            await router(network).end.start()
        network.crash(CONTROL)
        node.send(CONTROL, 1)
        await asyncio.sleep(1.0)
        assert node.events() == ["connected"]
        reborn = router(network)
        await reborn.end.start()
        await asyncio.sleep(10.0)
        assert node.events() == ["connected", "lost", "connected"]
        assert reborn.events() == ["connected"]
        lost_at = next(time for time, what, _, _ in node.seen if what == "lost")
        assert lost_at <= reborn.seen[0][0]  # before anything could be sent across the two lives
        assert reborn.numbers() == []
        assert control.numbers() == []
        node.send(CONTROL, 2)
        await reborn.end.close()
        await reborn.end.close()
        await asyncio.sleep(1.0)
        assert node.events() == ["connected", "lost", "connected", "lost"]

    run_virtual(run())


def test_a_close_is_noticed_at_once_after_what_was_sent() -> None:
    async def run() -> None:
        network = InprocNetwork()
        control, node = await pair(network)
        node.send(CONTROL, *range(20))
        await node.end.close()
        await asyncio.sleep(0.1)
        assert control.numbers() == list(range(20))
        assert control.seen[-1][1:3] == ("lost", "d1")

    run_virtual(run())


def test_a_dealer_may_come_before_its_router() -> None:
    async def run() -> None:
        network = InprocNetwork()
        node = dealer(network, "d1")
        await node.end.start()
        await asyncio.sleep(60.0)
        assert node.events() == []
        control = router(network)
        await control.end.start()
        await asyncio.sleep(60.0)
        assert node.events() == control.events() == ["connected"]

    run_virtual(run())


def test_the_queue_is_bounded() -> None:
    async def run() -> None:
        network = InprocNetwork(queue_size=10)
        control, node = await pair(network)
        network.partition("d1", CONTROL)
        node.send(CONTROL, *range(10))
        with pytest.raises(MailboxFull, match="10 messages wait"):
            node.send(CONTROL, 10)
        network.heal()
        await asyncio.sleep(1.0)
        node.send(CONTROL, 11)
        await asyncio.sleep(1.0)
        assert control.numbers() == [*range(10), 11]

    run_virtual(run())


def test_an_ill_typed_message_is_refused_and_costs_the_session() -> None:
    async def run() -> None:
        network = InprocNetwork()
        control, node = await pair(network)
        node.end.send(CONTROL, Released(request_id="r", generation="x", num_blocks=0))
        await asyncio.sleep(1.0)
        assert control.events() == ["connected", "bad", "lost", "connected"]
        assert node.events() == ["connected", "lost", "connected"]
        assert network.history[0].fate is Fate.REFUSED

    run_virtual(run())


def test_a_remote_ref_tells_over_an_endpoint() -> None:
    async def run() -> None:
        network = InprocNetwork()
        control, node = await pair(network)
        end: Endpoint = node.end
        RemoteRef(end, CONTROL).tell(Abort(request_id="r", generation=4, reason=""))
        await asyncio.sleep(1.0)
        assert control.numbers() == [4]
        assert end.identity == "d1"
        assert end.address == "inproc://control"

    run_virtual(run())
