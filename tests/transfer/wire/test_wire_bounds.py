"""Traffic that is wrong or too much, over real sockets: answered in a sentence, bounded, harming nobody else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest
import zmq
from wire_helpers import ANY_PORT, SESSION, Log, abort, pair, raw_dealer, read, started, until

from transfer.errors import ConfigError, MailboxFull, PeerLost, ProtocolError
from transfer.wire import frames
from transfer.wire.codec import MAX_MESSAGE_BYTES, Codec, encode
from transfer.wire.endpoint import Endpoint
from transfer.wire.messages import CONTROL, MESSAGES, PROTOCOL_VERSION, Abort, Message
from transfer.wire.zmq import DealerEndpoint, RouterEndpoint


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
