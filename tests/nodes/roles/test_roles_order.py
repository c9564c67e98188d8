"""Blocks return only when nobody can touch them any more: revoke and abort come before the core frees."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from roles_harness import Fleet, Options, prompt, virtual

from transfer.kv.port import KvOffer
from transfer.wire.messages import KvPeer, Migrate, Released, RequestLost, Reserved

TOKENS = prompt(400)
SLOW = Options(speed=0.5)


class Watch:
    """Wraps an instance's port: notes how many blocks the request held when it was revoked, or its push aborted."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.shell = fleet.shell(name)
        self.port = self.shell.context.port
        self.revoked: list[int] = []
        self.aborted: list[int] = []
        self._revoke, self._open = self.port.revoke, self.port.open
        self.port.revoke, self.port.open = self.revoke, self.open

    def held(self, request_id: str) -> int:
        return sum(h.num_blocks for h in self.shell.core.holdings() if h.request_id == request_id)

    def revoke(self, request_id: str, generation: int) -> None:
        self.revoked.append(self.held(request_id))
        self._revoke(request_id, generation)

    async def open(self, peer: KvPeer, offer: KvOffer, blocks: Sequence[int], timeout_s: float) -> Any:
        sender = await self._open(peer, offer, blocks, timeout_s)
        abort = sender.abort

        def watched(reason: str) -> None:
            self.aborted.append(self.held(offer.request_id))
            abort(reason)

        sender.abort = watched
        return sender


@pytest.mark.parametrize("ms", [0, 20, 60])
@virtual
async def test_decode_revokes_before_it_frees(ms: int) -> None:
    async with Fleet("p0", "d0", options=SLOW) as fleet:
        watch = Watch(fleet, "d0")
        await fleet.control.hand_off("r", TOKENS)
        await asyncio.sleep(ms / 1000)
        fleet.control.abort("d0", "r")
        await fleet.control.expect(Released, "r", "d0")
        assert watch.revoked[0] == 100
        fleet.control.abort("p0", "r")


@pytest.mark.parametrize("ms", [20, 60])
@virtual
async def test_prefill_stops_its_sender_before_it_frees(ms: int) -> None:
    async with Fleet("p0", "d0", options=SLOW) as fleet:
        watch = Watch(fleet, "p0")
        await fleet.control.hand_off("r", TOKENS)
        await asyncio.sleep(ms / 1000)
        fleet.control.abort("p0", "r")
        await fleet.control.expect(Released, "r", "p0")
        assert watch.aborted
        assert watch.aborted[0] == 100
        fleet.control.abort("d0", "r")


@virtual
async def test_a_lease_that_ends_revokes_in_the_same_breath() -> None:
    async with Fleet("p0", "d0") as fleet:
        watch = Watch(fleet, "d0")
        fleet.control.reserve("d0", "r", TOKENS, lease_s=1.0)
        await fleet.control.expect(RequestLost, "r")
        assert len(watch.revoked) == 1


@virtual
async def test_a_migration_stops_its_sender_before_an_abort_frees() -> None:
    async with Fleet("p0", "d0", "d1", options=SLOW) as fleet:
        control = fleet.control
        await control.hand_off("r", TOKENS, max_tokens=100)
        await control.until(lambda: len(control.output.get("r", ())) >= 3, "some tokens")
        sofar = control.output["r"]
        control.reserve("d1", "r", TOKENS + sofar, generation=2, max_tokens=100, num_output=len(sofar))
        reserved = await control.expect(Reserved, "r", "d1")
        watch = Watch(fleet, "d0")
        order = Migrate(
            request_id="r", generation=1, target=control.peer("d1"), target_generation=2,
            have_tokens=reserved.have_tokens, lease_s=5.0,
        )  # fmt: skip
        fleet.shell("d0").context.engine.handoff_s = lambda num_tokens: 0.5
        control.send("d0", order)
        await asyncio.sleep(0.1)  # the push is open, the emulated link still carries it
        control.abort("d0", "r")
        await control.expect(Released, "r", "d0")
        assert watch.aborted
        assert watch.aborted[0] >= 100
        control.abort("d1", "r", 2)
