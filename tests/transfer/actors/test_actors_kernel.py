"""Mailboxes, tell, ask, and what a supervisor does when an actor fails. All in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest

from transfer.actors.actor import Actor
from transfer.actors.clock import run_virtual
from transfer.actors.ref import ActorRef
from transfer.actors.supervision import RestartPolicy, Strategy, Supervisor
from transfer.errors import DeadlinePassed, MailboxFull, PeerLost, Refused


class Scribe(Actor):
    """Writes down what it receives; obeys a few words."""

    def __init__(self, log: list[str], *, mailbox_size: int = 16) -> None:
        super().__init__(mailbox_size=mailbox_size)
        self.log = log
        self.count = 0

    async def started(self) -> None:
        self.log.append("started")

    async def stopped(self) -> None:
        self.log.append("stopped")

    async def receive(self, message: object) -> object:
        self.count += 1
        match message:
            case "fail":
                raise LookupError("the secret prompt")
            case "refuse":
                raise Refused("not today")
            case "cancelled":
                inner = asyncio.get_running_loop().create_future()
                inner.cancel()
                await inner
            case ("sleep", float(seconds)):
                await asyncio.sleep(seconds)
            case "never":
                await asyncio.Event().wait()
        self.log.append(f"got {message}")
        return self.count


class Escalations(list[tuple[str, str]]):
    def __call__(self, name: str, error: Exception) -> None:
        self.append((name, type(error).__name__))


def supervised(
    body: Callable[[Supervisor, ActorRef, list[str], Escalations], Any],
    policy: RestartPolicy | None = None,
    mailbox_size: int = 16,
) -> None:
    """Run `body` with one supervised Scribe, stop everything, and see that no task is left."""

    async def run() -> None:
        log: list[str] = []
        escalations = Escalations()
        supervisor = Supervisor("test", escalations)
        ref = supervisor.spawn("scribe", lambda: Scribe(log, mailbox_size=mailbox_size), policy)
        try:
            await body(supervisor, ref, log, escalations)
        finally:
            await supervisor.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(run())


def test_messages_are_received_in_order_one_at_a_time() -> None:
    async def body(supervisor: Supervisor, ref: ActorRef, log: list[str], _: Escalations) -> None:
        ref.tell(("sleep", 5.0))
        ref.tell("b")
        assert await ref.ask("c", timeout_s=10.0) == 3
        assert asyncio.get_running_loop().time() == 5.0
        assert log == ["started", "got ('sleep', 5.0)", "got b", "got c"]

    supervised(body)


def test_a_full_mailbox_refuses_at_once() -> None:
    async def body(supervisor: Supervisor, ref: ActorRef, log: list[str], _: Escalations) -> None:
        ref.tell(("sleep", 1.0))
        await asyncio.sleep(0.5)
        ref.tell("a")
        ref.tell("b")
        with pytest.raises(MailboxFull, match="scribe is full with 2 messages"):
            ref.tell("c")
        with pytest.raises(MailboxFull):
            await ref.ask("d", timeout_s=1.0)
        await asyncio.sleep(1.0)
        ref.tell("e")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert log[1:] == ["got ('sleep', 1.0)", "got a", "got b", "got e"]

    supervised(body, mailbox_size=2)


def test_an_ask_ends_at_its_deadline_and_what_was_not_begun_is_not_done() -> None:
    async def body(supervisor: Supervisor, ref: ActorRef, log: list[str], _: Escalations) -> None:
        ref.tell(("sleep", 3.0))
        with pytest.raises(DeadlinePassed, match=r"scribe did not answer a str within 1 s"):
            await ref.ask("too late", timeout_s=1.0)
        assert asyncio.get_running_loop().time() == 1.0
        with pytest.raises(DeadlinePassed):
            await ref.ask(("sleep", 9.0), timeout_s=5.0)
        assert await ref.ask("next", timeout_s=60.0) == 3  # the sleeps and this one, not "too late"
        assert "got too late" not in log

    supervised(body)


def test_a_cancelled_asker_takes_its_question_back() -> None:
    async def body(supervisor: Supervisor, ref: ActorRef, log: list[str], _: Escalations) -> None:
        ref.tell(("sleep", 1.0))
        asker = asyncio.create_task(ref.ask("forget it", timeout_s=60.0))
        await asyncio.sleep(0.5)
        asker.cancel()
        await asyncio.wait((asker,))
        await asyncio.sleep(1.0)
        assert asker.cancelled()
        assert "got forget it" not in log

    supervised(body)


def test_a_refusal_is_an_answer_not_a_failure() -> None:
    async def body(supervisor: Supervisor, ref: ActorRef, log: list[str], escalations: Escalations) -> None:
        for _ in range(10):
            with pytest.raises(Refused, match="not today"):
                await ref.ask("refuse", timeout_s=1.0)
        assert log == ["started"]
        assert escalations == []

    supervised(body)


def test_a_failure_restarts_the_actor_with_fresh_state_and_the_same_mailbox(caplog: pytest.LogCaptureFixture) -> None:
    async def body(supervisor: Supervisor, ref: ActorRef, log: list[str], escalations: Escalations) -> None:
        ref.tell("a")
        ref.tell("fail")
        ref.tell("b")
        assert await ref.ask("c", timeout_s=1.0) == 2  # counted from the restart
        assert log == ["started", "got a", "stopped", "started", "got b", "got c"]
        with pytest.raises(LookupError, match="secret prompt"):
            await ref.ask("fail", timeout_s=1.0)
        assert await ref.ask("d", timeout_s=1.0) == 1
        assert escalations == []

    with caplog.at_level(logging.DEBUG):
        supervised(body)
    failures = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert len(failures) == 2
    assert "actor scribe failed (LookupError) and is restarted" in failures[0]
    assert "receive" in failures[0]
    assert "secret" not in caplog.text


def test_too_many_failures_escalate_once_and_fail_what_waits() -> None:
    async def body(supervisor: Supervisor, ref: ActorRef, log: list[str], escalations: Escalations) -> None:
        bystander_log: list[str] = []
        bystander = supervisor.spawn("bystander", lambda: Scribe(bystander_log))
        ref.tell(("sleep", 0.5))
        for _ in range(3):
            ref.tell("fail")
        waiting = asyncio.create_task(ref.ask("c", timeout_s=60.0))
        await asyncio.sleep(1.0)
        assert escalations == [("scribe", "LookupError")]
        assert asyncio.get_running_loop().time() == 1.0
        with pytest.raises(PeerLost, match="scribe ended before it handled"):
            await waiting
        with pytest.raises(PeerLost, match="scribe has ended"):
            ref.tell("d")
        assert supervisor.actors == ("bystander",)
        assert await bystander.ask("still here", timeout_s=1.0) == 1
        assert log.count("started") == log.count("stopped") == 3

    supervised(body, RestartPolicy(max_restarts=2, window_s=60.0))


def test_failures_far_apart_do_not_add_up() -> None:
    async def body(supervisor: Supervisor, ref: ActorRef, log: list[str], escalations: Escalations) -> None:
        for _ in range(10):
            ref.tell("fail")
            await asyncio.sleep(61.0)
        assert escalations == []
        assert await ref.ask("a", timeout_s=1.0) == 1

    supervised(body, RestartPolicy(max_restarts=1, window_s=60.0))


def test_escalate_takes_the_first_failure() -> None:
    async def body(supervisor: Supervisor, ref: ActorRef, log: list[str], escalations: Escalations) -> None:
        ref.tell("fail")
        await asyncio.sleep(1.0)
        assert escalations == [("scribe", "LookupError")]
        assert log == ["started", "stopped"]

    supervised(body, RestartPolicy(strategy=Strategy.ESCALATE))


def test_a_stray_cancellation_is_a_failure_not_an_end() -> None:
    async def body(supervisor: Supervisor, ref: ActorRef, log: list[str], escalations: Escalations) -> None:
        with pytest.raises(PeerLost):
            await ref.ask("cancelled", timeout_s=1.0)
        assert await ref.ask("a", timeout_s=1.0) == 1
        assert log == ["started", "stopped", "started", "got a"]

    supervised(body)


def test_an_actor_that_cannot_start_again_escalates() -> None:
    async def run() -> None:
        lives = iter([Scribe([])])
        escalations = Escalations()
        supervisor = Supervisor("test", escalations)
        ref = supervisor.spawn("once", lambda: next(lives), RestartPolicy(max_restarts=2))
        ref.tell("fail")
        await asyncio.sleep(1.0)
        assert escalations == [("once", "StopIteration")]
        with pytest.raises(LookupError, match="no factory"):
            supervisor.spawn("never", failing_factory)
        assert supervisor.actors == ()
        await supervisor.stop()

    def failing_factory() -> Actor:
        raise LookupError("no factory")

    run_virtual(run())


def test_stop_finishes_what_is_queued_youngest_first() -> None:
    async def run() -> None:
        log: list[str] = []

        class Named(Scribe):
            async def stopped(self) -> None:
                self.log.append(f"{self.name} stopped")

        supervisor = Supervisor("test", Escalations())
        refs = [supervisor.spawn(name, lambda: Named(log)) for name in ("a", "b", "c")]
        for ref in refs:
            ref.tell(("sleep", 1.0))
            ref.tell("last")
        await supervisor.stop(deadline_s=10.0)
        assert [line for line in log if "stopped" in line] == ["c stopped", "b stopped", "a stopped"]
        assert log.count("got last") == 3
        assert supervisor.actors == ()

    run_virtual(run())


def test_stop_cancels_at_the_deadline_and_answers_who_asked(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        log: list[str] = []
        supervisor = Supervisor("test", Escalations())
        stuck = supervisor.spawn("stuck", lambda: Scribe(log))
        supervisor.spawn("other", lambda: Scribe(log))
        asked = asyncio.create_task(stuck.ask("never", timeout_s=60.0))
        queued = asyncio.create_task(stuck.ask("queued", timeout_s=60.0))
        await asyncio.sleep(1.0)
        await supervisor.stop(deadline_s=2.0)
        assert asyncio.get_running_loop().time() == 3.0
        with pytest.raises(PeerLost, match="stuck was stopped while it handled a str"):
            await asked
        with pytest.raises(PeerLost, match="stuck ended before it handled"):
            await queued
        assert log.count("stopped") == 2

    run_virtual(run())
    assert "failed" not in caplog.text


def test_an_actor_that_ignores_cancellation_does_not_hold_up_stop(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(Actor):
        async def receive(self, message: object) -> object | None:
            for _ in range(2):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            return None

    async def run() -> None:
        supervisor = Supervisor("test", Escalations())
        supervisor.spawn("stubborn", Stubborn).tell("x")
        await asyncio.sleep(1.0)
        await supervisor.stop_actor("stubborn", deadline_s=1.0)
        assert asyncio.get_running_loop().time() == 3.0
        await supervisor.stop_actor("stubborn", deadline_s=1.0)

    run_virtual(run())
    assert "stubborn ignores its cancellation" in caplog.text


def test_names_are_unique_until_free_again() -> None:
    async def body(supervisor: Supervisor, ref: ActorRef, log: list[str], _: Escalations) -> None:
        with pytest.raises(ValueError, match="has an actor scribe already"):
            supervisor.spawn("scribe", lambda: Scribe(log))
        await supervisor.stop_actor("scribe")
        await supervisor.stop_actor("scribe")
        again = supervisor.spawn("scribe", lambda: Scribe(log))
        assert await again.ask("a", timeout_s=1.0) == 1

    supervised(body)


def test_a_busy_actor_lets_others_run() -> None:
    async def run() -> None:
        log: list[str] = []
        actor = Scribe(log, mailbox_size=1000)
        ref = ActorRef.of(actor)
        for number in range(1000):
            ref.tell(number)
        task = asyncio.create_task(actor.run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert 0 < actor.count < 1000
        actor.mailbox.close()
        await task
        assert actor.count == 1000

    run_virtual(run())


def test_an_unhandled_kind_names_the_type_only() -> None:
    async def run() -> None:
        actor = Actor()
        task = asyncio.create_task(actor.run())
        with pytest.raises(TypeError, match="actor Actor does not handle dict"):
            await ActorRef.of(actor).ask({"prompt": "secret"}, timeout_s=1.0)
        with pytest.raises(TypeError):
            await task

    run_virtual(run())
