"""The online planner: proposes role switches, or makes them. In one sentence:

every 1.5 s it asks which few role switches would win most goodput under the traffic of the last 10, 60 and 300 s, and
makes them when three times in a row one of these windows is surer of the gain than chance, the model's error, the
switch itself and the return of the earlier load can cost and no shorter one speaks against it, after which it rests for
15 s.

Its three timers are autopilot_every_s, autopilot_window_s (and the sixth of it) and autopilot_rest_s. It never takes
the last instance of a role, leaves alone what an operator pinned, and holds while it cannot see. Every look leaves a
line; what is shown is what looks in a row agree on (looks.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from controlplane.core.desk import Desk
from controlplane.core.diary import Diary
from controlplane.core.events import (
    Audit,
    AutopilotReady,
    AutopilotRestored,
    AutopilotWanted,
    PlanRefused,
)
from controlplane.core.evidence import SHORT, Evidence, Observer, since_of
from controlplane.core.fleet import Group
from controlplane.core.forecast import DEFAULT_ERROR
from controlplane.core.instance import Instance
from controlplane.core.looks import AGREE, Look, Steady, hold
from controlplane.core.moves import NOTHING_TO_GAIN, Advice, Found, Rules, advise
from controlplane.core.pins import SPLIT, Pins
from controlplane.core.plans import AUTOPILOT, Plans
from controlplane.core.tried import MIN_OUTCOME, Tried, counts_of
from controlplane.text import shown
from transfer.api import AuditRow, Prediction
from transfer.autopilot import AutopilotMode, AutopilotSettings, AutopilotView, Evaluation
from transfer.errors import InvalidValue
from transfer.said import Said, counted, names, said_of, say

MAX_EVALUATIONS = 256
SHOWN_EVALUATIONS = 50
SILENT_BEATS = 3
BLIND_SHARE = 0.1
"""It is blind when more than this share of the engines has been silent for SILENT_BEATS; any one, of a few."""
MAX_SHARE = 3
"""A move takes at most every third engine, when nothing else is set."""
LEAST_BETTER = 0.02
"""Attainment by which a split that was tried before must have been better."""
HOLDS = ("quiet", "measuring", "met", "unsure", "busy")
"""Codes of looks that propose nothing: the audit tells when a proposal ends, not every change between them."""


class Autopilot:
    """Single owner: SchedulerCore. Deterministic; decides in `tick`."""

    def __init__(self, desk: Desk, plans: Plans, pins: Pins) -> None:
        self._desk, self._plans, self._pins, self._observer = desk, plans, pins, Observer(desk)
        self._tried, self._diary = Tried(), Diary(desk, pins)
        config = desk.config
        self.mode: AutopilotMode = config.autopilot
        self._floor, self._max_moves = config.autopilot_floor, config.autopilot_max_moves
        self._looked_s: float | None = None
        self._looks: deque[Look] = deque(maxlen=MAX_EVALUATIONS)
        self._told: dict[str, tuple[str, str]] = {}
        """Of each model, what the audit was last told, and since how many looks."""
        self._since: dict[str, int] = {}
        self._steady: dict[str, Steady] = {}
        self.counts = {"looks": 0, "moves": 0, "proposals": 0}
        self._shown: Look | None = None
        self._begin()
        self._diary.keep(self.mode, self._floor, self._max_moves)

    # --- what happens -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look when it is time to."""
        desk = self._desk
        self._diary.keep(self.mode, self._floor, self._max_moves)
        if self.mode == "off":
            return
        if self._looked_s is not None and desk.now - self._looked_s < desk.config.autopilot_every_s - 1e-6:
            return
        self._looked_s = desk.now
        looks = [self._look(model, group) for model, group in sorted(desk.fleet.groups.items())]
        shown = [self._note(look) for look in looks or [hold(desk.now, "", "quiet", say("hold.no_engine"))]]
        self._shown = next((one for one in shown if one.code not in HOLDS), shown[-1])
        self.said = self._shown.said

    def wanted(self, event: AutopilotWanted) -> None:
        """Set the mode, a limit or a pin; answered with AutopilotReady or PlanRefused."""
        refused = self._pin(event) if event.pin is not None else None
        refused = refused or (self._unpin(event) if event.unpin is not None else None)
        if refused is not None:
            self._desk.emit(PlanRefused(ask_id=event.ask_id, status=refused[0], said=refused[1]))
            return
        if event.change is not None:
            self._change(event)
            self.tick()  # so that the answer says what it sees
        self._diary.keep(self.mode, self._floor, self._max_moves)
        self._desk.emit(AutopilotReady(ask_id=event.ask_id, view=self.view(self._desk.now)))

    def restored(self, event: AutopilotRestored) -> None:
        """Go on as the earlier life was set. Settings that were changed since then hold; pins are whole or over."""
        state, config = event.state, self._desk.config
        if state.configured == (config.autopilot, config.autopilot_floor, config.autopilot_max_moves):
            self.mode, self._floor, self._max_moves = state.mode, state.floor, state.max_moves
            self._begin()
        for pin in state.pins:
            left_s = None if pin.left_s is None else pin.left_s - event.age_s
            if left_s is None or left_s > 0:
                self._pins.put(pin.subject, pin.who, left_s, pin.why, self._desk.now)

    def unjudge(self) -> None:
        """Objectives changed: how well a split did under the old ones is forgotten, and looks begin anew."""
        self._tried, self._observer = Tried(), Observer(self._desk)
        self._steady.clear()

    def view(self, now: float) -> AutopilotView:
        config = self._desk.config
        errors = [one.profile.error for one in self._desk.fleet.engines() if one.latency is not None]
        declared = max((error for error in errors if error is not None), default=DEFAULT_ERROR)
        whole = rule(config.autopilot_every_s, config.autopilot_window_s, config.traffic_window_s,
                     config.autopilot_rest_s)  # fmt: skip
        return AutopilotView(
            mode=self.mode, rule=str(whole), rule_said=whole, line=str(self.said), said=self.said,
            settings=AutopilotSettings(
                every_s=config.autopilot_every_s, window_s=config.autopilot_window_s, rest_s=config.autopilot_rest_s,
                floor=self._floor, max_moves=self._max_moves, pin_s=config.pin_s,
            ),
            evaluations=tuple(_evaluation(one, now) for one in list(self._looks)[: -SHOWN_EVALUATIONS - 1 : -1]),
            pins=self._pins.views(now), score=self._plans.scores.view(declared),
            shown=_evaluation(self._shown, now) if self._shown is not None else None,
        )  # fmt: skip

    # --- looking ----------------------------------------------------------------------------------------------

    def _look(self, model: str, group: Group) -> Look:
        """One model's look: what stands in the way, else what would help."""
        desk = self._desk
        if silent := _silent(desk, group):
            late_s = SILENT_BEATS * desk.config.heartbeat_s
            blind = say("hold.blind", seconds=f"{late_s:g}", ids=names(silent))
            return hold(desk.now, model, "blind", blind)
        if self._plans.applying is not None:
            return hold(desk.now, model, "busy", say("hold.busy", plan=self._plans.applying.plan_id))
        if not self._of(model).moving <= {one.id for one in group.members if one.ready}:
            del self._steady[model]  # what is shown cannot be done any more
        since_s = since_of(self._plans.ended_s)
        if self._observer.calm(model, group, since_s):
            return hold(desk.now, model, "met", NOTHING_TO_GAIN)
        evidence = self._observer.gather(model, group, since_s)
        if evidence.lacks is not None:
            return hold(desk.now, model, "measuring" if evidence.measuring else "quiet", evidence.lacks)
        counts = counts_of(list(evidence.roles.values()))
        self._tried.came_out(model, counts, evidence.work, evidence.good, evidence.counted)
        ready = [one for one in evidence.windows[0].instances if one.hello.shares_kv]
        free = [one for one in ready if self._pins.get(one.id, desk.now) is None]
        found, pinned = self._advise(model, evidence, free), tuple[Said, ...]()
        if found.advice is None and len(free) < len(ready):
            found, pinned = self._unless_pinned(found, self._advise(model, evidence, ready))
        if found.advice is None:
            code = "met" if found.best is None else "unsure"
            return hold(desk.now, model, code, found.said, found.best)
        if self._observer.changing(model):
            changing = say("hold.changing", advice=found.advice.said)
            return hold(desk.now, model, "unsure", changing, found.advice)
        why = self._no_better(model, evidence, found.advice)
        why = why or self._observer.turns_back(model, group, evidence, found.advice)
        if why is not None:
            return hold(desk.now, model, "unsure", why, found.advice)
        if (pin := self._pins.get(SPLIT, desk.now)) is not None:
            pinned = (pin.said,)
        missing = AGREE - 1 - self._of(model).num_sure(desk.now, found.advice.direction)
        if missing > 0:
            again = counted("hold.again", missing, advice=found.advice.said)
            return hold(desk.now, model, "unsure", again, found.advice, found.advice.direction)
        return self._act(model, found.advice, pinned)

    def _act(self, model: str, advice: Advice, pinned: tuple[Said, ...]) -> Look:
        """The move is right: make it, unless it is not ours to make now."""
        desk = self._desk

        def would(why: Said | tuple[Said, ...]) -> Said:
            return say("hold.would", why=why, advice=advice.said)

        if pinned:
            return hold(desk.now, model, "pinned", would(pinned), advice, advice.direction)
        if self.mode != "auto":
            return Look(desk.now, model, "advise", advice.said, advice, advice.direction)
        ended_s = self._plans.ended_s
        if ended_s is not None and (left_s := ended_s + desk.config.autopilot_rest_s - desk.now) > 0:
            resting = say("hold.resting", seconds=f"{left_s:.0f}")
            return hold(desk.now, model, "resting", would(resting), advice, advice.direction)
        try:
            plan = self._plans.own(advice.roles, advice.relative[0])
        except InvalidValue as error:
            return hold(desk.now, model, "refused", would(said_of(error)), advice)
        self.counts["moves"] += 1
        return Look(desk.now, model, "move", say("advice.moving", advice=advice.said, plan=plan.plan_id), advice)

    def _unless_pinned(self, found: Found, anyhow: Found) -> tuple[Found, tuple[Said, ...]]:
        """What would be done if no instance were pinned, and the pin that is in the way; else what was found."""
        if anyhow.advice is None:
            return found, ()
        pins = [self._pins.get(one.id, self._desk.now) for one, _ in anyhow.advice.switches]
        named = tuple(pin.said for pin in pins if pin is not None)
        return (anyhow, named) if named else (found, ())

    def _advise(self, model: str, evidence: Evidence, movable: Sequence[Instance]) -> Found:
        most = self._max_moves or -(-len(evidence.roles) // MAX_SHARE)
        return advise(evidence.windows, evidence.roles, Rules(
            movable=movable, floor=self._floor, most=most, duration_s=self._plans.duration_s,
            horizon_s=self._desk.config.autopilot_window_s, trust=self._plans.scores.error, named=self._of(model).named,
        ))  # fmt: skip

    def _no_better(self, model: str, evidence: Evidence, advice: Advice) -> Said | None:
        """Why the move is not made again: the split that it leads to was tried under about this load."""
        roles = dict(evidence.roles) | {one.id: role for one, role in advice.switches}
        before = self._tried.attainment(model, counts_of(list(roles.values())), evidence.work)
        if before is None:
            return None
        now = evidence.good / evidence.counted if evidence.counted >= MIN_OUTCOME else advice.before.attainment
        if before >= now + LEAST_BETTER:
            return None
        return say("hold.no_better", moves=advice.named, promise=advice.promise, before=f"{before:.0%}",
                   now=f"{now:.0%}")  # fmt: skip

    def _of(self, model: str) -> Steady:
        return self._steady.setdefault(model, Steady(self._desk.config.autopilot_every_s))

    # --- telling ----------------------------------------------------------------------------------------------

    def _note(self, look: Look) -> Look:
        """Keep the line; tell the audit when what is shown of what it would do, or of what is in the way, changes.
        Returns what is shown."""
        self._looks.append(look)
        self._diary.looked(look.model, look.code, str(look.said))
        self.counts["looks"] += 1
        look = self._of(look.model).note(look)
        quiet = look.code in HOLDS or (look.code == "blind" and self.mode != "auto")
        what = ("", "") if quiet else (look.code, look.advice.kinds if look.advice is not None else "")
        before = self._told.get(look.model, ("", ""))
        self._since[look.model] = self._since.get(look.model, 0) + 1
        if what == before:
            return look
        if look.advice is not None and not quiet:
            self.counts["proposals"] += 1
        self._told[look.model] = what
        looks, self._since[look.model] = self._since[look.model], 0
        action = "hold" if quiet or look.code not in ("advise", "move") else look.code
        said = say("autopilot.looks", line=look.said, num=looks)
        self._audit(AUTOPILOT, action, look.model, said, _predicted(look.advice))
        return look

    def _audit(self, actor: str, action: str, subject: str, said: Said, predicted: Prediction | None = None) -> None:
        self._desk.emit(Audit(row=AuditRow(
            at_s=0.0, actor=actor, action=action, subject=subject, detail=str(said), said=said, predicted=predicted,
        )))  # fmt: skip

    def _begin(self) -> None:
        """Before the first look under a mode."""
        self._steady.clear()
        every = f"{self._desk.config.autopilot_every_s:g}"
        self.said = say("autopilot.off") if self.mode == "off" else say("autopilot.soon", every=every)
        self._shown = None

    # --- operators --------------------------------------------------------------------------------------------

    def _change(self, event: AutopilotWanted) -> None:
        change, said = event.change, list[Said]()
        assert change is not None
        if change.mode is not None and change.mode != self.mode:
            said.append(say("autopilot.mode", before=self.mode, after=change.mode))
            self.mode, self._looked_s = change.mode, None
            self._begin()
        if change.floor is not None and change.floor != self._floor:
            said.append(say("autopilot.floor", before=self._floor, after=change.floor))
            self._floor = change.floor
        if change.max_moves is not None and (most := change.max_moves or None) != self._max_moves:
            third = say("autopilot.third")
            said.append(say("autopilot.most", before=self._max_moves or third, after=most or third))
            self._max_moves = most
        if said:
            self._audit(change.actor, "autopilot", "autopilot", say("autopilot.changed", changes=tuple(said)))

    def _pin(self, event: AutopilotWanted) -> tuple[int, Said] | None:
        desk, pin = self._desk, event.pin
        assert pin is not None
        if pin.subject != SPLIT and desk.fleet.live(pin.subject) is None:
            return 404, say("refused.no_pin", id=shown(pin.subject), split=repr(SPLIT))
        if not self._pins.put(pin.subject, pin.actor, pin.ttl_s, pin.why, desk.now):
            return 409, say("refused.pins")
        how_long = say("pin.until") if pin.ttl_s is None else say("pin.for", seconds=f"{pin.ttl_s:g}")
        said = say("pin.reason", how_long=how_long, why=pin.why) if pin.why else how_long
        self._audit(pin.actor, "pin", pin.subject, said)
        return None

    def _unpin(self, event: AutopilotWanted) -> tuple[int, Said] | None:
        assert event.unpin is not None
        if not self._pins.release(event.unpin, self._desk.now):
            return 404, say("refused.not_pinned", id=shown(event.unpin))
        self._audit(event.actor, "unpin", event.unpin, say("pin.released"))
        return None


def rule(every_s: float, window_s: float, long_s: float, rest_s: float) -> Said:
    """The whole controller, in one sentence."""
    return say("autopilot.rule", every=f"{every_s:g}", short=f"{SHORT * window_s:g}", middle=f"{window_s:g}",
               long=f"{long_s:g}", rest=f"{rest_s:g}")  # fmt: skip


def _silent(desk: Desk, group: Group) -> list[str]:
    """The engines that are out of hearing, when they are too many to go on."""
    late_s = SILENT_BEATS * desk.config.heartbeat_s
    silent = [one.id for one in group.members if desk.now - one.last_seen_s > late_s]
    return silent if len(silent) > BLIND_SHARE * len(group.members) else []


def _evaluation(look: Look, now: float) -> Evaluation:
    advice = look.advice
    gain, low, high = advice.relative if advice is not None else (None, None, None)
    return Evaluation(
        ago_s=max(0.0, now - look.at_s), model=look.model, code=look.code, line=str(look.said), said=look.said,
        moves=advice.roles if advice is not None else {}, gain=gain, low=low, high=high,
        duration_s=advice.duration_s if advice is not None else None,
    )  # fmt: skip


def _predicted(advice: Advice | None) -> Prediction | None:
    if advice is None:
        return None
    rate, before = advice.after.rate_per_s, advice.before.attainment
    window = say("basis.window", seconds=f"{advice.window_s:.0f}")
    return Prediction(
        duration_s=advice.duration_s, goodput_per_s=advice.after.goodput_per_s,
        goodput_low=rate * max(0.0, before + advice.low), goodput_high=rate * min(1.0, before + advice.high),
        ttft_p50_s=advice.after.ttft_p50_s, tpot_p50_s=advice.after.tpot_p50_s, attainment=advice.after.attainment,
        basis=str(window), said=window,
    )  # fmt: skip


__all__ = ["Autopilot", "rule"]
