"""Real sockets over loopback, on asyncio's loop and on uvloop: sessions, restarts, silence, bad traffic, bounds."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
import zmq

from transfer.errors import ConfigError, MailboxFull, PeerLost, ProtocolError
from transfer.wire import frames
from transfer.wire.codec import MAX_MESSAGE_BYTES, Codec, encode
from transfer.wire.endpoint import Endpoint, PeerEvent, Timing
from transfer.wire.messages import CONTROL, MESSAGES, PROTOCOL_VERSION, Abort, Message
from transfer.wire.sockets import shared_context
from transfer.wire.zmq import DealerEndpoint, RouterEndpoint

ANY_PORT = "tcp://127.0.0.1:0"
QUICK = Timing(heartbeat_s=0.1, liveness_s=0.4)
PATIENCE_S = 10.0


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a coroutine on either loop; fails when the loop reports an error that the test did not take."""

    def run_on(coro: Coroutine[Any, Any, None]) -> None:
        reported: list[dict[str, Any]] = []

        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
            async with asyncio.timeout(60.0):
                await coro
            assert asyncio.all_tasks() == {asyncio.current_task()}

        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(watched())
        assert reported == []

    return run_on


class Log:
    """What one endpoint saw, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Any]] = []
        self.callbacks: dict[str, Any] = {
            "on_message": lambda peer, message: self.seen.append(("message", peer, message.generation)),
            "on_peer": lambda peer, event: self.seen.append((event.value, peer, None)),
            "on_bad": lambda peer, error: self.seen.append(("bad", peer, str(error))),
        }

    def of(self, peer: str) -> list[str]:
        return [what for what, name, _ in self.seen if name == peer and what != "message"]

    def numbers(self, peer: str = CONTROL) -> list[int]:
        return [number for what, name, number in self.seen if what == "message" and name == peer]

    def complaints(self) -> list[str]:
        return [text for what, _, text in self.seen if what == "bad"]


def abort(number: int, size: int = 0) -> Message:
    return Abort(request_id="r", generation=number, reason="x" * size)


async def until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> float:
    """Seconds until the condition held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < patience_s, "waited in vain"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


@asynccontextmanager
async def started(*endpoints: RouterEndpoint | DealerEndpoint) -> AsyncIterator[None]:
    try:
        for endpoint in endpoints:
            await endpoint.start()
        yield
    finally:
        for endpoint in reversed(endpoints):
            await endpoint.close()


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[RouterEndpoint, Log, DealerEndpoint, Log]]:
    """A router and a dealer "d1", connected."""
    at_router, at_dealer = Log(), Log()
    router = RouterEndpoint(ANY_PORT, **at_router.callbacks, **options)
    async with started(router):
        dealer = DealerEndpoint(router.address, "d1", **at_dealer.callbacks, **options)
        async with started(dealer):
            await until(lambda: at_dealer.of(CONTROL) == at_router.of("d1") == ["connected"])
            yield router, at_router, dealer, at_dealer


@asynccontextmanager
async def raw_dealer(address: str, identity: bytes | None = b"raw") -> AsyncIterator[zmq.Socket[bytes]]:
    socket = shared_context().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 20)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close()


async def read(socket: zmq.Socket[bytes]) -> bytes:
    """The next message of a raw socket."""
    await until(lambda: bool(socket.poll(0)))
    return socket.recv()


SESSION = b"session1"


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


def test_a_restarted_router_is_rejoined_and_nothing_old_is_replayed(run: Callable[..., None]) -> None:
    async def body() -> None:
        async with pair() as (router, _, dealer, at_dealer):
            address = router.address
            dealer.send(CONTROL, abort(1))
            await router.close()
            assert await until(lambda: at_dealer.of(CONTROL) == ["connected", "lost"]) < 1.0
            with pytest.raises(PeerLost, match="not connected, so a Abort was not sent"):
                dealer.send(CONTROL, abort(2))
            await asyncio.sleep(0.5)
            at_router = Log()
            reborn = RouterEndpoint(address, **at_router.callbacks)
            async with started(reborn):
                assert await until(lambda: at_router.of("d1") == ["connected"]) < 3.0
                await until(lambda: at_dealer.of(CONTROL) == ["connected", "lost", "connected"])
                dealer.send(CONTROL, abort(3))
                reborn.send("d1", abort(4))
                await until(lambda: at_router.numbers("d1") == [3] and at_dealer.numbers() == [4])

    run(body())


def test_a_dealer_may_come_before_its_router(run: Callable[..., None]) -> None:
    async def body() -> None:
        holder = RouterEndpoint(ANY_PORT, **Log().callbacks)
        await holder.start()
        await holder.close()
        at_dealer = Log()
        dealer = DealerEndpoint(holder.address, "d1", **at_dealer.callbacks)
        async with started(dealer):
            await asyncio.sleep(0.5)
            assert at_dealer.seen == []
            async with started(RouterEndpoint(holder.address, **Log().callbacks)):
                assert await until(lambda: at_dealer.of(CONTROL) == ["connected"]) < 3.0

    run(body())


def test_a_dealer_that_comes_back_under_its_identity_is_lost_then_connected(run: Callable[..., None]) -> None:
    async def body() -> None:
        async with pair() as (router, at_router, dealer, at_dealer):
            at_second = Log()
            second = DealerEndpoint(router.address, "d1", **at_second.callbacks)
            async with started(second):
                await until(lambda: at_second.of(CONTROL) == ["connected"])
                assert at_router.of("d1") == ["connected", "lost", "connected"]
                router.send("d1", abort(1))
                second.send(CONTROL, abort(2))
                await until(lambda: at_second.numbers() == [1] and at_router.numbers("d1") == [2])
                assert at_dealer.numbers() == []
                await dealer.close()
                await asyncio.sleep(0.3)
                assert at_router.of("d1") == ["connected", "lost", "connected"]

    run(body())


CHILD = """
import asyncio, sys
from transfer.wire.zmq import DealerEndpoint
async def main():
    dealer = DealerEndpoint(sys.argv[1], "child", on_message=lambda *_: None, on_peer=lambda *_: None)
    await dealer.start()
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_a_killed_process_is_lost_long_before_liveness(run: Callable[..., None]) -> None:
    async def body() -> None:
        log = Log()
        router = RouterEndpoint(ANY_PORT, **log.callbacks, timing=Timing(heartbeat_s=10.0, liveness_s=30.0))
        async with started(router):
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, router.address)
            try:
                await until(lambda: log.of("child") == ["connected"])
                child.send_signal(signal.SIGKILL)
                assert await until(lambda: log.of("child") == ["connected", "lost"]) < 1.0
                with pytest.raises(PeerLost):
                    router.send("child", abort(1))
            finally:
                if child.returncode is None:
                    child.kill()
                await child.wait()

    run(body())


def test_a_stopped_process_is_lost_after_liveness_and_comes_back(run: Callable[..., None]) -> None:
    async def body() -> None:
        log = Log()
        router = RouterEndpoint(ANY_PORT, **log.callbacks, timing=QUICK)
        script = CHILD.replace("on_peer=", "timing=Timing(0.1, 0.4), on_peer=").replace(
            "import asyncio, sys", "import asyncio, sys\nfrom transfer.wire.endpoint import Timing"
        )
        async with started(router):
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", script, router.address)
            try:
                await until(lambda: log.of("child") == ["connected"])
                child.send_signal(signal.SIGSTOP)
                assert 0.2 < await until(lambda: log.of("child") == ["connected", "lost"]) < 2.0
                child.send_signal(signal.SIGCONT)
                await until(lambda: log.of("child") == ["connected", "lost", "connected"])
            finally:
                child.kill()
                await child.wait()

    run(body())


def test_a_silent_dealer_is_lost_and_told_that_its_session_is_stale(run: Callable[..., None]) -> None:
    async def body() -> None:
        log = Log()
        router = RouterEndpoint(ANY_PORT, **log.callbacks, timing=QUICK)
        async with started(router), raw_dealer(router.address) as raw:
            raw.send(frames.prefix(frames.OPEN, SESSION))
            assert await read(raw) == frames.prefix(frames.PONG, SESSION)
            raw.send(frames.prefix(frames.PING, SESSION))
            assert await read(raw) == frames.prefix(frames.PONG, SESSION)
            assert 0.2 < await until(lambda: log.of("raw") == ["connected", "lost"]) < 2.0
            raw.send(frames.prefix(frames.MESSAGE, SESSION) + encode(abort(1)))
            assert await read(raw) == frames.prefix(frames.STALE, SESSION)
            assert log.numbers("raw") == []

    run(body())


def test_frames_of_an_old_session_are_not_delivered(run: Callable[..., None]) -> None:
    async def body() -> None:
        log = Log()
        router = RouterEndpoint(ANY_PORT, **log.callbacks)
        async with started(router), raw_dealer(router.address) as raw:
            raw.send(frames.prefix(frames.OPEN, b"session2"))
            raw.send(frames.prefix(frames.MESSAGE, b"session1") + encode(abort(1)))
            raw.send(frames.prefix(frames.MESSAGE, b"session2") + encode(abort(2)))
            await until(lambda: log.numbers("raw") == [2])
            assert log.of("raw") == ["connected"]

    run(body())


def test_a_silent_router_is_left_for_a_fresh_session(run: Callable[..., None]) -> None:
    async def body() -> None:
        log = Log()
        raw = shared_context().socket(zmq.ROUTER)
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.ROUTER_HANDOVER, 1)
        raw.bind(ANY_PORT)
        dealer = DealerEndpoint(raw.getsockopt_string(zmq.LAST_ENDPOINT), "d1", **log.callbacks, timing=QUICK)
        try:
            async with started(dealer):
                name, opening = await read(raw), raw.recv()
                assert name == b"d1"
                assert opening[0] == frames.OPEN
                first = opening[1:]
                raw.send_multipart([name, frames.prefix(frames.PONG, b"another1")])
                raw.send_multipart([name, frames.prefix(frames.MESSAGE, b"another1") + encode(abort(1))])
                raw.send_multipart([name, frames.prefix(frames.PONG, first)])
                await until(lambda: log.of(CONTROL) == ["connected"])
                assert log.numbers() == []
                await until(lambda: log.of(CONTROL) == ["connected", "lost"])
                sessions = set()
                while len(sessions) < 2:
                    await read(raw)
                    sessions.add(raw.recv()[1:])
                assert len(sessions - {first}) >= 1
        finally:
            raw.close()

    run(body())


def test_a_blocked_loop_does_not_lose_the_living(run: Callable[..., None]) -> None:
    async def body() -> None:
        async with pair(timing=QUICK) as (_, at_router, dealer, at_dealer):
            for _ in range(3):
                time.sleep(QUICK.liveness_s * 2)  # noqa: ASYNC251 (blocking the loop is the point)
                await asyncio.sleep(0.15)
            dealer.send(CONTROL, abort(1))
            await until(lambda: at_router.numbers("d1") == [1])
            assert at_router.of("d1") == at_dealer.of(CONTROL) == ["connected"]

    run(body())


def test_another_protocol_version_is_refused_in_a_sentence(run: Callable[..., None]) -> None:
    async def body() -> None:
        at_router, at_dealer = Log(), Log()
        router = RouterEndpoint(ANY_PORT, **at_router.callbacks)
        async with started(router):
            newer = Codec(MESSAGES, PROTOCOL_VERSION + 1)
            dealer = DealerEndpoint(router.address, "new", **at_dealer.callbacks, codec=newer)
            async with started(dealer):
                await until(lambda: at_dealer.of(CONTROL) == ["connected"])
                dealer.send(CONTROL, abort(1))
                await until(lambda: len(at_dealer.complaints()) == 1)
                text = at_dealer.complaints()[0]
                assert "refused new: the peer speaks protocol version 2 and this process speaks version 1" in text
                assert at_router.seen[1][:2] == ("bad", "new")
                assert at_router.of("new")[:3] == [
                    "connected",
                    "bad",
                    "lost",
                ]

    run(body())


@pytest.mark.parametrize(
    "parts",
    [
        [b""], [b"O"], [b"\x00" * 9], [b"Z" + SESSION], [b"GET / HTTP/1.1"], [b"Q" + SESSION, b"more"],
        [b"M" + SESSION], [b"M" + SESSION + b"junk"], [b"M" + SESSION + encode(abort(1)), b"more"],
        [b"M" + SESSION + encode(abort(1)) + b"!"],
    ],
)  # fmt: skip
def test_malformed_traffic_is_answered_and_dropped(run: Callable[..., None], parts: list[bytes]) -> None:
    async def body() -> None:
        async with pair() as (router, at_router, dealer, at_dealer), raw_dealer(router.address) as raw:
            raw.send(frames.prefix(frames.OPEN, SESSION))
            assert (await read(raw))[0] == frames.PONG
            raw.send_multipart(parts)
            answer = await read(raw)
            assert answer[0] == frames.REFUSED
            assert re.search("Phaseplane|a message was refused", frames.sentence(answer))
            assert at_router.of("raw") == ["connected", "bad", "lost"]
            assert at_router.numbers("raw") == []
            dealer.send(CONTROL, abort(7))  # the others go on
            await until(lambda: at_router.numbers("d1") == [7])
            assert at_dealer.of(CONTROL) == ["connected"]

    run(body())


@pytest.mark.parametrize("identity", [None, b"\xff\xfe", b"x" * 200])
def test_peers_without_a_proper_name_are_not_heard(run: Callable[..., None], identity: bytes | None) -> None:
    async def body() -> None:
        async with pair() as (router, at_router, dealer, _), raw_dealer(router.address, identity) as raw:
            raw.send(frames.prefix(frames.OPEN, SESSION))
            raw.send(b"junk")
            await asyncio.sleep(0.2)
            dealer.send(CONTROL, abort(1))
            await until(lambda: at_router.numbers("d1") == [1])
            assert router.peers == ("d1",)
            assert {name for _, name, _ in at_router.seen} == {"d1"}

    run(body())


def test_an_oversized_frame_costs_its_sender_the_connection(run: Callable[..., None]) -> None:
    async def body() -> None:
        async with pair() as (router, at_router, dealer, _at_dealer), raw_dealer(router.address) as raw:
            raw.setsockopt(zmq.RECONNECT_IVL, -1)
            raw.send(frames.prefix(frames.OPEN, SESSION))
            await until(lambda: "raw" in router.peers)
            raw.send(frames.prefix(frames.MESSAGE, SESSION) + bytes(MAX_MESSAGE_BYTES + 100))
            await until(lambda: at_router.of("raw") == ["connected", "lost"])
            largest = abort(2, MAX_MESSAGE_BYTES - 1000)
            dealer.send(CONTROL, largest)
            await until(lambda: at_router.numbers("d1") == [2])
            with pytest.raises(ProtocolError, match="split it"):
                dealer.send(CONTROL, abort(3, MAX_MESSAGE_BYTES))

    run(body())


def fill(endpoint: Endpoint, peer: str, complaint: str) -> list[int]:
    """Send megabytes until the queue is full; the numbers that were accepted."""
    for number in range(1000):
        try:
            endpoint.send(peer, abort(number, 1_000_000))
        except MailboxFull as full:
            return list(range(number)) if complaint in str(full) else []
    return []


def test_the_send_queue_is_bounded_and_other_peers_do_not_feel_it(run: Callable[..., None]) -> None:
    async def body() -> None:
        async with pair(queue_size=20) as (router, _, _dealer, at_dealer), raw_dealer(router.address) as raw:
            raw.send(frames.prefix(frames.OPEN, SESSION))
            await until(lambda: "raw" in router.peers)
            assert len(fill(router, "raw", "raw reads too slowly: 20 messages wait")) >= 10
            router.send("d1", abort(5))
            await until(lambda: at_dealer.numbers() == [5])

    run(body())


def test_a_dealers_queue_is_bounded_too(run: Callable[..., None]) -> None:
    async def body() -> None:
        async with pair(queue_size=20) as (_, at_router, dealer, _):
            sent = fill(dealer, CONTROL, "reads too slowly: 20 messages wait")
            assert len(sent) >= 10
            await until(lambda: at_router.numbers("d1") == sent)
            dealer.send(CONTROL, abort(99_999))
            await until(lambda: at_router.numbers("d1")[-1] == 99_999)

    run(body())


def test_unknown_peers_are_lost_peers(run: Callable[..., None]) -> None:
    async def body() -> None:
        async with pair() as (router, _, dealer, _):
            with pytest.raises(PeerLost, match="nobody is not connected"):
                router.send("nobody", abort(1))
            with pytest.raises(PeerLost, match="d2 is not connected"):
                dealer.send("d2", abort(1))

    run(body())


def test_a_failing_callback_is_reported_and_the_rest_is_delivered() -> None:
    async def body() -> list[str]:
        reported: list[str] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(type(context["exception"]).__name__)
        )
        got: list[int] = []

        def on_message(peer: str, message: Message) -> None:
            assert isinstance(message, Abort)
            got.append(message.generation)
            if message.generation % 10 == 0:
                raise LookupError("callback")

        log = Log()
        router = RouterEndpoint(ANY_PORT, on_message=on_message, on_peer=lambda *_: None)
        async with started(router):
            dealer = DealerEndpoint(router.address, "d1", **log.callbacks)
            async with started(dealer):
                await until(lambda: log.of(CONTROL) == ["connected"])
                for number in range(100):
                    dealer.send(CONTROL, abort(number))
                await until(lambda: got == list(range(100)))
        return reported

    assert asyncio.run(body()) == ["LookupError"] * 10


def test_a_port_in_use_is_a_clear_error_and_a_closed_one_is_free_at_once(run: Callable[..., None]) -> None:
    async def body() -> None:
        router = RouterEndpoint(ANY_PORT, **Log().callbacks)
        async with started(router):
            rival = RouterEndpoint(router.address, **Log().callbacks)
            with pytest.raises(ConfigError, match=r"cannot bind tcp://127.0.0.1:\d+ .*choose another port"):
                await rival.start()
            await rival.close()
        for _ in range(50):
            again = RouterEndpoint(router.address, **Log().callbacks)
            await again.start()
            await again.close()
            await again.close()

    run(body())


def test_nothing_is_called_after_close(run: Callable[..., None]) -> None:
    async def body() -> None:
        async with pair() as (router, at_router, dealer, at_dealer):
            dealer.send(CONTROL, abort(1))
            router.send("d1", abort(1))
            await dealer.close()
            await dealer.close()
            before = list(at_dealer.seen)
            with pytest.raises(PeerLost):
                dealer.send(CONTROL, abort(2))
            await router.close()
            seen = list(at_router.seen)
            with pytest.raises(PeerLost):
                router.send("d1", abort(2))
            await asyncio.sleep(0.3)
            assert at_dealer.seen == before
            assert at_router.seen == seen

    run(body())


@pytest.mark.parametrize("identity", ["", "x" * 129, "\0hidden"])
def test_an_improper_identity_is_refused(identity: str) -> None:
    with pytest.raises(ConfigError, match="instance id"):
        DealerEndpoint("tcp://127.0.0.1:1", identity, **Log().callbacks)
