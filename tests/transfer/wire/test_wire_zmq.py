"""Real sockets over loopback, on asyncio's loop and on uvloop: sessions, order, many peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from wire_helpers import ANY_PORT, QUICK, Log, abort, pair, started, until

from transfer.wire.endpoint import Endpoint, PeerEvent, Timing
from transfer.wire.messages import CONTROL, Message
from transfer.wire.zmq import DealerEndpoint, RouterEndpoint


def test_messages_arrive_in_order_both_ways(run: Callable[..., None]) -> None:
    async def body() -> None:
        async with pair() as (router, at_router, dealer, at_dealer):
            for number in range(3000):
                dealer.send(CONTROL, abort(number))
                router.send("d1", abort(number))
                if number % 500 == 0:
                    await asyncio.sleep(0)
            await until(lambda: len(at_router.numbers("d1")) == len(at_dealer.numbers()) == 3000)
            assert at_router.numbers("d1") == at_dealer.numbers() == list(range(3000))
            assert router.peers == ("d1",)
            assert router.address.startswith("tcp://127.0.0.1:")
            assert not router.address.endswith(":0")

    run(body())


def test_an_answer_from_inside_a_callback_needs_no_other_wakeup(run: Callable[..., None]) -> None:
    async def body() -> None:
        bounces = 0
        ends: dict[str, Endpoint] = {}

        def bounce(peer: str, message: Message) -> None:
            nonlocal bounces
            bounces += 1
            if bounces < 500:
                ends[peer].send({"d1": "d1", CONTROL: CONTROL}[peer], message)

        def ready(peer: str, event: PeerEvent) -> None:
            if event is PeerEvent.CONNECTED:
                ends[CONTROL].send(CONTROL, abort(1))

        slow = Timing(heartbeat_s=30.0, liveness_s=90.0)  # no ping may come to help
        router = RouterEndpoint(ANY_PORT, on_message=bounce, on_peer=lambda *_: None, timing=slow)
        async with started(router):
            dealer = DealerEndpoint(router.address, "d1", on_message=bounce, on_peer=ready, timing=slow)
            ends.update({"d1": router, CONTROL: dealer})
            async with started(dealer):
                await until(lambda: bounces == 500)

    run(body())


def test_a_send_that_swallows_the_signal_of_an_arrival_loses_nothing(run: Callable[..., None]) -> None:
    slow = Timing(heartbeat_s=30.0, liveness_s=90.0)  # no tick may come to help

    async def body() -> None:
        async with pair(timing=slow) as (router, at_router, dealer, at_dealer):
            for number in range(20):
                dealer.send(CONTROL, abort(number))
                time.sleep(0.01)  # noqa: ASYNC251 (it arrives while the loop is busy)
                router.send("d1", abort(number))
                time.sleep(0.01)  # noqa: ASYNC251
                dealer.send(CONTROL, abort(number))
                await until(lambda: len(at_router.numbers("d1")) == 2 * number + 2)  # noqa: B023
                await until(lambda: len(at_dealer.numbers()) == number + 1)  # noqa: B023

    run(body())


def test_the_number_of_peers_is_bounded(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.wire.router.MAX_PEERS", 1)

    async def body() -> None:
        async with pair() as (router, _, dealer, at_dealer):
            log = Log()
            async with started(DealerEndpoint(router.address, "d2", **log.callbacks)):
                await until(lambda: "too many peers" in "".join(log.complaints()))
                assert log.of(CONTROL)[0] == "bad"
            await dealer.close()
            log = Log()
            async with started(DealerEndpoint(router.address, "d3", **log.callbacks)):
                await until(lambda: "connected" in log.of(CONTROL))
            assert at_dealer.of(CONTROL) == ["connected"]

    run(body())


def test_a_dropped_peer_hears_why(run: Callable[..., None]) -> None:
    async def body() -> None:
        async with pair() as (router, at_router, _, at_dealer):
            router.drop("d1", "this model is not served here")
            assert at_router.of("d1") == ["connected", "lost"]
            await until(lambda: len(at_dealer.seen) >= 3)
            assert at_dealer.seen[1] == ("bad", CONTROL, "the control plane refused d1: this model is not served here")
            assert at_dealer.seen[2] == ("lost", CONTROL, None)

    run(body())


def test_sixty_four_dealers_in_one_process(run: Callable[..., None]) -> None:
    async def body() -> None:
        at_router = Log()
        logs = {f"i{number:02}": Log() for number in range(64)}
        router = RouterEndpoint(ANY_PORT, **at_router.callbacks, timing=QUICK)
        async with started(router):
            dealers = [
                DealerEndpoint(router.address, name, **log.callbacks, timing=QUICK) for name, log in logs.items()
            ]
            async with started(*dealers):
                await until(lambda: all(log.of(CONTROL) == ["connected"] for log in logs.values()))
                for number in range(50):
                    for dealer in dealers:
                        dealer.send(CONTROL, abort(number))
                        router.send(dealer.identity, abort(number))
                await until(lambda: all(len(log.numbers()) == 50 for log in logs.values()))
                await until(lambda: len(at_router.seen) == 64 * 51)
                await asyncio.sleep(QUICK.liveness_s * 2)
                for name, log in logs.items():
                    assert at_router.numbers(name) == log.numbers() == list(range(50))
                    assert at_router.of(name) == log.of(CONTROL) == ["connected"]
            await until(lambda: router.peers == ())

    run(body())
