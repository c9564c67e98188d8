"""What keys that change something do: rebalance, move, drain, undo, autopilot, pins. Each through its dialogs.

Every call goes through ui/client.py and ui/rebalance.py, as the command line's do; the control plane decides.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from textual.screen import Screen

from transfer.api import ApplyRequest, HoldAction, InstanceView, Plan, PlanRequest
from transfer.autopilot import AutopilotMode, AutopilotRequest, AutopilotView, PinRequest
from ui import rebalance
from ui.client import FleetClient
from ui.errors import CliError
from ui.feed import STALE_S
from ui.figures import span
from ui.insight import ENGINES, advised, last_done, other_roles, present, refusal_text
from ui.tui.dialogs import Ask, Choice, Confirm, Option, PlanDialog
from ui.tui.draw_plan import plan_lines
from ui.tui.lines import Line, Tone, line, wrap
from ui.tui.model import Picture
from ui.tui.pen import Pen

PLAN_TIMEOUT_S = 600.0
MODES: tuple[AutopilotMode, ...] = ("off", "advise", "auto")
SPLIT = "split"
MAX_SPLITS = 6
PLACED_STATES = ("ready", "joining")
FOLLOW = rebalance.Follow(PLAN_TIMEOUT_S)

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")


class Host(Protocol):
    """What the flows need of the screen."""

    pen: Pen
    plan: Plan | None

    def open(self, screen: Screen[S], then: Callable[[S | None], None]) -> None: ...

    @property
    def picture(self) -> Picture: ...

    @property
    def client(self) -> FleetClient | None: ...

    def say(self, text: str, tone: Tone = "") -> None: ...

    def begin(self, work: Coroutine[Any, Any, None], alone: str = "") -> None: ...


class Flows:
    """At most one plan is followed at a time; leaving its dialog does not stop it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._dialog: PlanDialog | None = None
        self._error = ""
        self._waits = False
        """For an answer to what was asked last; until it comes nothing else is offered."""

    def may_act(self) -> bool:
        """Says why not, when not."""
        host = self._host
        if host.picture.may_act and host.client is not None:
            return True
        picture, pen = host.picture, host.pen
        if picture.read_only or host.client is None:
            host.say(pen.say("action.disabled_read_only"), "warn")
        elif picture.stale or picture.fleet is None:
            host.say(pen.say("action.disabled_stale", age=span(STALE_S)), "warn")
        else:
            host.say(pen.say("tui.disabled_past"), "warn")
        return False

    def rebalance(self) -> None:
        """p: a split by name, its dry run, and so on."""
        fleet = self._host.picture.fleet
        if fleet is None or not self.may_act():
            return
        count = sum(view.role in ENGINES and view.state != "lost" for view in fleet.instances)
        splits = [f"{prefill}P{count - prefill}D" for prefill in range(1, count)]
        some = ", ".join([*(splits if len(splits) <= MAX_SPLITS else [*splits[:2], "...", splits[-1]]), f"{count}M"])
        hint = self._host.pen.say("tui.plan.shapes", xpyd=fleet.xpyd, count=count, shapes=some)

        def asked(xpyd: str | None) -> None:
            if xpyd:
                self._propose(PlanRequest(xpyd=xpyd))

        self._host.open(Ask(self._host.pen, self._host.pen.say("tui.plan.title"), hint, fleet.xpyd), asked)

    def move(self, view: InstanceView | None) -> None:
        """m: another role for one instance; without one, what the autopilot advises."""
        if not self.may_act():
            return
        if view is None:
            self._host.begin(self._move_as_advised())
            return
        pen = self._host.pen
        roles = other_roles(view)
        if not roles:
            self._host.say(pen.say("tui.no_move", id=view.id), "warn")
            return
        options = [Option(role, pen.role(role).text) for role in roles]

        def chosen(role: str | None) -> None:
            if role:
                self._propose(PlanRequest(moves={view.id: role}))

        title = pen.say("tui.move.title", id=view.id, role=pen.name("role", view.role))
        self._host.open(Choice(pen, title, options), chosen)

    def hold(self, view: InstanceView | None, action: HoldAction | None = None) -> None:
        """An action, by default as `d` does: drain an instance that serves, resume one that is not placed on."""
        if not self.may_act():
            return
        pen = self._host.pen
        if view is None:
            self._host.say(pen.say("tui.choose_instance"), "warn")
            return
        action = action or ("drain" if view.state in PLACED_STATES else "resume")
        version = self._version()
        client = self._host.client

        def draw(width: int) -> list[Line]:
            said = pen.say(f"tui.{action}.what", id=view.id, running=view.num_running, waiting=view.num_waiting)
            return [line(one) for one in wrap(said, width)]

        def sure(yes: bool | None) -> None:
            if yes and client is not None and self.may_act():
                request = ApplyRequest(base_version=version, idempotency_key=uuid.uuid4().hex)
                what = f"{pen.say(f'action.{action}')} {view.id}"
                self._host.begin(self._act(lambda: client.hold(view.id, action, request), what))

        title = f"{pen.say(f'action.{action}')} {view.id}"
        typed = view.id if action == "drain" else ""
        self._host.open(Confirm(pen, title, draw, pen.say(f"action.{action}"), typed), sure)

    def undo(self, plan: Plan | None = None) -> None:
        """u: take the last plan back."""
        if self.may_act():
            self._host.begin(self._offer_undo(plan))

    def autopilot(self, view: InstanceView | None) -> None:
        """a: its mode, and pins."""
        if self.may_act():
            self._host.begin(self._offer_autopilot(view))

    def refresh(self) -> None:
        """The picture changed: what may be done may have changed."""
        self._show()

    async def _move_as_advised(self) -> None:
        client, pen = self._host.client, self._host.pen
        if client is None:
            return
        moves = await self._answer(client.autopilot(), advised)
        if moves:
            self._propose(PlanRequest(moves=dict(moves)))
        elif moves is not None:
            self._host.say(pen.say("tui.choose_instance"), "warn")

    def _propose(self, wanted: PlanRequest) -> None:
        client = self._host.client
        if client is not None and self.may_act():
            self._host.plan = None
            self._open(self._host.pen.say("tui.plan.title"))
            self._watch(rebalance.propose(client, wanted))

    async def _offer_undo(self, plan: Plan | None) -> None:
        client, pen = self._host.client, self._host.pen
        if client is None:
            return
        self._error = ""
        last = plan or await self._answer(client.plans(), last_done)
        if last is None:
            if not self._error:
                self._host.say(pen.say("tui.undo.nothing"), "warn")
            return

        def draw(width: int) -> list[Line]:
            said = pen.say("tui.undo.what", plan=last.plan_id, before=last.before, after=last.after)
            return [line(one) for one in wrap(said, width)]

        def sure(yes: bool | None) -> None:
            if yes and self.may_act():
                self._open(pen.say("action.undo"))
                self._watch(rebalance.undo(client, last.plan_id, FOLLOW, self._progress))

        self._host.open(Confirm(pen, pen.say("action.undo"), draw, pen.say("action.undo")), sure)

    async def _offer_autopilot(self, view: InstanceView | None) -> None:
        client, pen = self._host.client, self._host.pen
        found = await self._answer(client.autopilot(), lambda one: one) if client is not None else None
        if found is None or client is None:
            return
        ways = autopilot_ways(pen, client, found, [SPLIT, *([view.id] if view is not None else [])])
        preset = pen.say("tui.autopilot.set", mode=pen.name("autopilot", found.mode))
        here = {preset: pen.say("tui.autopilot.here")}
        options = [Option(label, label, here.get(label, "")) for label in ways]

        def chosen(label: str | None) -> None:
            if label and self.may_act():
                self._host.begin(self._act(ways[label], label))

        self._host.open(Choice(pen, pen.say("tui.autopilot.title"), options, preset), chosen)

    def _open(self, title: str) -> None:
        if self._dialog is not None:
            return

        def left(_: object) -> None:
            self._dialog = None

        self._dialog = PlanDialog(self._host.pen, title, self._do)
        self._host.open(self._dialog, left)

    def _do(self, what: str) -> None:
        plan, client = self._host.plan, self._host.client
        if plan is None or client is None or self._waits or not self.may_act():
            return
        if what == "apply":
            self._watch(rebalance.carry_out(client, plan, FOLLOW, self._progress))
        else:
            self._watch(rebalance.undo(client, plan.plan_id, FOLLOW, self._progress))

    def _watch(self, work: Coroutine[Any, Any, Plan]) -> None:
        """Follow a plan to its end instead of the one before."""
        self._error, self._waits = "", True
        self._host.begin(self._follow(work), alone="plan")
        self._show()

    async def _follow(self, work: Coroutine[Any, Any, Plan]) -> None:
        """Its dialog says how it ends, or the line below when that was left."""
        pen = self._host.pen
        try:
            plan = self._host.plan = await work
        except CliError as error:
            self._error = refusal_text(error, self._host.pen.words)
            self._host.say(self._error, "bad")
        else:
            if self._dialog is None and plan.status not in rebalance.RUNNING:
                change = f"{plan.before} {pen.arrow()} {plan.after}"
                self._host.say(
                    pen.say("tui.plan.ended", plan=plan.plan_id, change=change, status=pen.name("plan", plan.status))
                )
        self._waits = False
        self._show()

    def _progress(self, plan: Plan) -> None:
        self._host.plan, self._waits = plan, False
        self._show()

    def _show(self) -> None:
        dialog, plan, pen, error = self._dialog, self._host.plan, self._host.pen, self._error
        if dialog is None or not dialog.is_mounted:
            return
        fleet = self._host.picture.fleet
        now = None if fleet is None else present(fleet)

        def draw(width: int) -> list[Line]:
            found = plan_lines(pen, plan, width, now) if plan is not None else []
            if error:
                return [*(line(one, "bad") for one in wrap(error, width)), *found]
            return found or [line(pen.say("tui.plan.asking"), "dim")]

        offer = ""
        if plan is not None and plan.steps and not self._waits:
            offer = {"planned": "apply", "done": "undo"}.get(plan.status, "")
        dialog.show(draw, offer, self._host.picture.may_act)

    async def _act(self, act: Callable[[], Awaitable[object]], what: str) -> None:
        pen = self._host.pen
        if await self._answer(act(), lambda _: True):
            self._host.say(pen.say("action.done", what=what), "good")

    async def _answer(self, asked: Awaitable[T], read: Callable[[T], R]) -> R | None:
        """What the fleet answered, read; None when it refused, which is said below."""
        try:
            return read(await asked)
        except CliError as error:
            self._error = refusal_text(error, self._host.pen.words)
            self._host.say(self._error, "bad")
            return None

    def _version(self) -> int:
        fleet = self._host.picture.fleet
        return fleet.version if fleet is not None else 0


def autopilot_ways(
    pen: Pen, client: FleetClient, found: AutopilotView, subjects: Sequence[str]
) -> dict[str, Callable[[], Awaitable[object]]]:
    """What can be done about the autopilot, by what it is called: modes, pins of these subjects, releases."""
    ways: dict[str, Callable[[], Awaitable[object]]] = {}
    for mode in MODES:
        label = pen.say("tui.autopilot.set", mode=pen.name("autopilot", mode))
        ways[label] = partial(client.set_autopilot, AutopilotRequest(mode=mode))
    pinned = [pin.subject for pin in found.pins]
    for subject in subjects:
        if subject not in pinned:
            ways[pen.say("tui.autopilot.do_pin", subject=subject)] = partial(client.pin, PinRequest(subject=subject))
    for subject in pinned:
        ways[pen.say("tui.autopilot.do_unpin", subject=subject)] = partial(client.unpin, subject)
    return ways
