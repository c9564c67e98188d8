"""Peers that restart, are killed, fall silent or come back, over real sockets."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable

import pytest
import zmq
from wire_helpers import ANY_PORT, QUICK, SESSION, Log, abort, pair, raw_dealer, read, started, until

from transfer.errors import PeerLost
from transfer.wire import frames
from transfer.wire.codec import encode
from transfer.wire.endpoint import Timing
from transfer.wire.messages import CONTROL
from transfer.wire.sockets import shared_context
from transfer.wire.zmq import DealerEndpoint, RouterEndpoint


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
