"""Who owns an actor's task: starts it, restarts it when it fails, stops it by a deadline. Never handles messages."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from transfer.actors.actor import Actor, Mailbox
from transfer.actors.ref import ActorRef
from transfer.errors import PeerLost

_CANCEL_PATIENCE_S = 1.0
_log = logging.getLogger(__name__)


class Strategy(StrEnum):
    ONE_FOR_ONE = "one_for_one"
    """Replace the failed actor alone, until it fails too often."""
    ESCALATE = "escalate"
    """The first failure is too many."""


@dataclass(frozen=True)
class RestartPolicy:
    """At most max_restarts within any window_s seconds; one more failure escalates."""

    strategy: Strategy = Strategy.ONE_FOR_ONE
    max_restarts: int = 3
    window_s: float = 60.0


@dataclass
class _Child:
    name: str
    factory: Callable[[], Actor]
    policy: RestartPolicy
    mailbox: Mailbox
    restarts: deque[float] = field(default_factory=deque)
    stopping: bool = False


class Supervisor:
    """Owns actors, each in a named task. A failure of one touches no other.

    A failed actor is replaced by a fresh one from its factory, which goes on with the same mailbox; refs
    stay valid. An actor that fails too often ends: its mailbox closes (asks fail with PeerLost) and
    on_escalate(name, error) is called once. Each failure is logged once, with the actor's name, the
    error's type and where it was raised, never with the error's text or the message: they may hold prompts.
    """

    def __init__(self, name: str, on_escalate: Callable[[str, Exception], None]) -> None:
        self.name = name
        self._on_escalate = on_escalate
        self._children: dict[str, _Child] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def actors(self) -> tuple[str, ...]:
        """Names of the actors alive, oldest first."""
        return tuple(self._children)

    def spawn(self, name: str, factory: Callable[[], Actor], policy: RestartPolicy | None = None) -> ActorRef:
        """Start an actor. Raises ValueError for a name in use, and whatever the factory raises the first time."""
        if name in self._children:
            raise ValueError(f"supervisor {self.name} has an actor {name} already; stop it first or use another name")
        actor = factory()
        actor.name = name
        child = _Child(name, factory, policy or RestartPolicy(), actor.mailbox)
        self._children[name] = child
        task = asyncio.create_task(self._supervise(child, actor), name=f"{self.name}/{name}")
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._ended(child, done))
        return ActorRef(name, child.mailbox)

    async def stop_actor(self, name: str, deadline_s: float = 5.0) -> None:
        """Close its mailbox, let it handle what is queued until the deadline, then cancel it.

        A name that is not alive does nothing. Not to be called by the actor itself.
        """
        child, task = self._children.get(name), self._tasks.get(name)
        if child is None or task is None:
            return
        child.stopping = True
        child.mailbox.close()
        try:
            await asyncio.wait((task,), timeout=max(0.0, deadline_s))
        finally:
            task.cancel()
        done, _ = await asyncio.wait((task,), timeout=_CANCEL_PATIENCE_S)
        if not done:
            _log.error("actor %s ignores its cancellation and was left behind", name)

    async def stop(self, deadline_s: float = 5.0) -> None:
        """Stop all, the youngest first; deadline_s is for all together."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        try:
            for name in reversed(self.actors):
                await self.stop_actor(name, end - loop.time())
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _supervise(self, child: _Child, first: Actor) -> None:
        actor: Actor | None = first
        while True:
            try:
                if actor is None:
                    actor = child.factory()
                    actor.name, actor.mailbox = child.name, child.mailbox
                await actor.run()
                return
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                failure: Exception = RuntimeError("something it awaited was cancelled")
            except Exception as error:  # noqa: BLE001 (the supervision boundary: any failure is logged and decided on)
                failure = error
            if not self._restarts(child, failure):
                return
            actor = None

    def _restarts(self, child: _Child, failure: Exception) -> bool:
        """Log the failure and say whether the actor is replaced; otherwise it has ended."""
        now = asyncio.get_running_loop().time()
        while child.restarts and child.restarts[0] <= now - child.policy.window_s:
            child.restarts.popleft()
        too_often = child.policy.strategy is Strategy.ESCALATE or len(child.restarts) >= child.policy.max_restarts
        verdict = "stopping" if child.stopping else "escalated" if too_often else "restarted"
        _log.error(
            "actor %s failed (%s) and is %s; at %s", child.name, type(failure).__name__, verdict, _where(failure)
        )
        if child.stopping:
            return False
        if too_often:
            self._release(child)
            self._on_escalate(child.name, failure)
            return False
        child.restarts.append(now)
        return True

    def _release(self, child: _Child) -> None:
        num_dropped = child.mailbox.abandon(PeerLost(f"actor {child.name} ended before it handled this message"))
        if num_dropped:
            _log.warning("actor %s ended with %d messages not handled", child.name, num_dropped)

    def _ended(self, child: _Child, task: asyncio.Task[None]) -> None:
        self._release(child)
        if self._children.get(child.name) is child:
            del self._children[child.name], self._tasks[child.name]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("on_escalate for actor %s raised %s at %s", child.name, type(error).__name__, _where(error))


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)) or "no frames"
