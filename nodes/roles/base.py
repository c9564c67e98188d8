"""What every role answers, and how a role that does one phase refuses the other in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nodes.roles.refusals import Order, refusal
from nodes.roles.shell import BatchShell
from transfer.errors import Refused
from transfer.kv.port import KvAnswer, KvAsk, KvDelegate, KvFetch, KvOffer, KvTrailer
from transfer.terms import Role
from transfer.wire.messages import (
    Abort,
    CacheSnapshotWanted,
    Holding,
    LoadReport,
    Message,
    Migrate,
    PoolMap,
    Prefill,
    Reserve,
)


class InstanceRole(KvDelegate, Protocol):
    """What an instance needs of the role it has. All of it runs on the event loop and does not block."""

    role: Role

    @property
    def idle(self) -> bool:
        """No request is here: the role may change."""

    def start(self) -> None: ...

    def receive(self, message: Message) -> None:
        """Any message but those of membership."""

    def holdings(self) -> tuple[Holding, ...]: ...

    def load(self) -> LoadReport: ...

    def snapshot(self) -> None:
        """Tell the directory everything that is cached here."""

    def drop_all(self, reason: str) -> None:
        """Forget every request; their blocks return."""

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every request is gone; False when that takes longer."""

    async def close(self) -> None: ...


class BatchRole:
    """A role over the batching shell. Roles share the shell: after a switch the prefix cache is still there."""

    role: Role

    def __init__(self, shell: BatchShell) -> None:
        self.shell = shell

    @property
    def idle(self) -> bool:
        return self.shell.idle

    def start(self) -> None:
        self.shell.start()

    def receive(self, message: Message) -> None:
        match message:
            case Prefill():
                self.prefill(message)
            case Reserve():
                self.reserve(message)
            case Migrate():
                self.migrate(message)
            case Abort():
                self.shell.abort(message)
            case PoolMap():
                self.shell.writer.set_pools(message)
            case CacheSnapshotWanted():
                self.shell.snapshot()

    def prefill(self, message: Prefill) -> None:
        self.refuse(message, self._not_mine())

    def reserve(self, message: Reserve) -> None:
        self.refuse(message, self._not_mine())

    def migrate(self, message: Migrate) -> None:
        self.refuse(message, self._not_mine())

    def refuse(self, order: Order, reason: str) -> None:
        self.shell.context.send(refusal(order, reason, free_blocks=self.shell.load().free_blocks))

    def holdings(self) -> tuple[Holding, ...]:
        return self.shell.core.holdings()

    def load(self) -> LoadReport:
        return self.shell.load()

    def snapshot(self) -> None:
        self.shell.snapshot()

    def drop_all(self, reason: str) -> None:
        self.shell.drop_all(reason)

    async def drain(self, timeout_s: float) -> bool:
        return await self.shell.drain(timeout_s)

    async def close(self) -> None:
        await self.shell.close()

    # --- KvDelegate: what a role without a decode phase says to peers ---------------------------------------

    def kv_offered(self, offer: KvOffer) -> Sequence[int]:
        raise Refused(self._not_mine())

    def kv_progress(self, offer: KvOffer) -> None:
        pass

    def kv_arrived(self, offer: KvOffer, trailer: KvTrailer) -> None:
        raise Refused(self._not_mine())

    def kv_failed(self, offer: KvOffer, reason: str) -> None:
        pass

    def kv_wanted(self, fetch: KvFetch) -> Sequence[int]:
        return ()  # engines keep what they cache to themselves; a pool serves

    def kv_served(self, fetch: KvFetch) -> None:
        pass

    def kv_asked(self, ask: KvAsk) -> KvAnswer:
        raise Refused(
            f"{self.shell.context.instance_id} is a {self.role} instance; put a {ask.kind} question to a kv_pool node"
        )

    def _not_mine(self) -> str:
        return f"{self.shell.context.instance_id} is a {self.role} instance; send this to one that does the other phase"
