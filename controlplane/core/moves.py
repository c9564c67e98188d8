"""Which role switches would bring how much goodput, how surely, and at what cost. Pure; autopilot.py decides whether.

A few switches are found greedily, each the best next one, and are weighed together under every window of traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from controlplane.core.forecast import Forecast, Predictor, Split
from controlplane.core.instance import Instance
from controlplane.core.intervals import Z80, Trust, off, spread, trusted
from controlplane.core.kinds import ROLES
from transfer.said import Said, say
from transfer.terms import InstanceId, Role

MIN_GAIN = 0.05
"""Smaller gains, as a share of the requests that count, are not worth a move (Narwhal's margin)."""
SURE = 3.0
"""Standard deviations of chance in the recorded traffic that a gain must survive: it is judged many times a day."""
LEAST_STEP = 0.005
"""Gain of one more switch in a move."""
SPARE_USE = 0.9
"""The phase that gives an instance away stays below this, or no worse off than the one that gets it was before."""
NOTHING_TO_GAIN = say("hold.met")

Switch = tuple[Instance, Role]


class Rules(NamedTuple):
    """What a search may do. movable: instances that may change role; floor: instances that a role keeps; most:
    switches in one move; duration_s: predicted drain and switch of an instance; horizon_s: how long a load is expected
    to last at least; trust: in the model; named: instances to name rather than others like them."""

    movable: Sequence[Instance]
    floor: int
    most: int
    duration_s: Callable[[Instance], float]
    horizon_s: float
    trust: Trust
    named: Set[InstanceId] = frozenset()


@dataclass(frozen=True, slots=True)
class Advice:
    """gain, low, high: attainment after less attainment before, with its 80 % interval. sure: what is left of it when
    chance is taken at SURE; cost: what draining and switching takes, spread over the horizon; both as attainment."""

    switches: tuple[Switch, ...]
    before: Forecast
    after: Forecast
    gain: float
    low: float
    high: float
    sure: float
    cost: float
    duration_s: float
    window_s: float

    @property
    def confident(self) -> bool:
        return self.gain >= MIN_GAIN and self.sure > self.cost

    @property
    def roles(self) -> dict[str, str]:
        """As a plan asks for it."""
        return {one.id: role.value for one, role in self.switches}

    @property
    def relative(self) -> tuple[float, float, float]:
        """Gain and its interval, as shares of the goodput now; of what is offered where that is next to nothing."""
        now = self.before.attainment if self.before.attainment >= MIN_GAIN else 1.0
        return self.gain / now, self.low / now, self.high / now

    def __str__(self) -> str:
        return str(self.said)

    @property
    def said(self) -> Said:
        return say("advice.move", moves=self.named, promise=self.promise, seconds=f"{self.duration_s:.0f}")

    @property
    def named(self) -> str:
        return ", ".join(f"{one.id} {_LETTER[one.role]}->{_LETTER[role]}" for one, role in self.switches)

    @property
    def kinds(self) -> str:
        """Which hardware goes where; which of several equal instances that would be is another one at every look."""
        return ", ".join(
            sorted(f"{one.hello.hardware.name} {_LETTER[one.role]}->{_LETTER[role]}" for one, role in self.switches)
        )

    @property
    def direction(self) -> str:
        """From which role to which, however many."""
        return ", ".join(sorted({f"{_LETTER[one.role]}->{_LETTER[role]}" for one, role in self.switches}))

    @property
    def promise(self) -> Said:
        gain, low, high = (round(100 * value) for value in self.relative)
        return say("advice.promise", gain=f"{gain:+d}", low=low, high=high)


class Found(NamedTuple):
    """advice None: hold, and why in `said`. best: what was found though not surely enough, with its reason."""

    advice: Advice | None
    said: Said
    best: Advice | None = None


def advise(windows: Sequence[Predictor], roles: Mapping[InstanceId, Role], rules: Rules) -> Found:
    """The move that one window makes sure of and no shorter one speaks against; windows from short to long."""
    shorter: list[Predictor] = []
    said, best = NOTHING_TO_GAIN, None
    for window in windows:
        split = window.split(roles)
        before = window.forecast(split)
        if before is not None and 1.0 - before.attainment >= MIN_GAIN:
            found = search(window, roles, rules)
            if found is None or found.gain < MIN_GAIN:
                if best is None:
                    said = say("hold.no_other", prefill=f"{before.prefill_use:.0%}", decode=f"{before.decode_use:.0%}")
            elif not found.confident:
                if best is None or found.gain > best.gain:
                    said, best = say("hold.unsure", moves=found.named, promise=found.promise), found
                    if found.sure > 0:
                        said = say("hold.unsure_cost", **said.values, seconds=f"{found.duration_s:.0f}")
            elif any(_gain(one, roles, found) < 2 * LEAST_STEP for one in shorter):
                said, best = say("hold.over", moves=found.named), found
            else:
                return Found(found, found.said, found)
        shorter.append(window)
    return Found(None, said, best)


def turns_back(
    slots: Sequence[Predictor | None], roles: Mapping[InstanceId, Role], advice: Advice, slot_s: float, seen_s: float
) -> Said | None:
    """Whether a load that asks for this move has come and gone in these slots (from old to new) so soon that following
    it costs more good requests than it brings: why, in a sentence; None when it pays.

    It is expected to last as long as it did before, or, once it has lasted twice that, as long again; then the fleet
    has the wrong split until that is seen (seen_s) and moved back."""
    gains = [0.0 if one is None else one.load.rate_per_s * one.counted * _gain(one, roles, advice) for one in slots]
    rates = [0.0 if one is None else one.load.rate_per_s * one.counted for one in slots]
    signs = [_sign(gain, LEAST_STEP * rate) for gain, rate in zip(gains, rates, strict=True)]
    runs = [(sign, len(list(run))) for sign, run in groupby(signs)]
    lasted_s = runs.pop()[1] * slot_s if runs and runs[-1][0] > 0 else seen_s
    before = [length * slot_s for sign, length in runs if sign > 0]
    against = [-gain for gain, sign in zip(gains, signs, strict=True) if sign < 0]
    if not before or not against:
        return None
    usual_s = sum(before) / len(before)
    left_s = max(0.0, usual_s - lasted_s) if lasted_s < 2 * usual_s else lasted_s
    wins = max(0.0, left_s - advice.duration_s) * advice.gain * advice.after.rate_per_s
    loses = (seen_s + advice.duration_s) * sum(against) / len(against)
    if wins > loses:
        return None
    return say("hold.turns_back", moves=advice.named, promise=advice.promise, seconds=f"{usual_s:.0f}")


def search(predictor: Predictor, roles: Mapping[InstanceId, Role], rules: Rules) -> Advice | None:
    """The best few switches under one window of traffic; None when none helps."""
    first = split = predictor.split(roles)
    before = now = predictor.forecast(split)
    if before is None or now is None:
        return None
    chosen: list[Switch] = []
    taken = dict(roles)
    while len(chosen) < rules.most:
        step = _best_step(predictor, split, taken, now, rules, rules.most - len(chosen))
        if step is None:
            break
        switches, split, now = step
        chosen += switches
        taken |= {one.id: role for one, role in switches}
    return _weigh(predictor, first, split, tuple(chosen), rules) if chosen else None


def _best_step(
    predictor: Predictor, split: Split, taken: Mapping[InstanceId, Role], now: Forecast, rules: Rules, most: int
) -> tuple[tuple[Switch, ...], Split, Forecast] | None:
    """The switch, or where that helps less the exchange of two kinds, that brings most."""
    singles = _singles(predictor, taken, rules)
    options: list[tuple[Switch, ...]] = [(one,) for one in singles]
    if most >= 2 and len(predictor.kinds) > 1:
        options += [
            (one, other)
            for one in singles
            for other in singles
            if one[0].id < other[0].id and taken[one[0].id] is other[1] and taken[other[0].id] is one[1]
        ]
    best: tuple[tuple[Switch, ...], Split, Forecast] | None = None
    most_worth = _worth(predictor, split, rules)
    for switches in options:
        trial = split
        for one, role in switches:
            trial = _moved(trial, predictor.kind_of(one.id), taken[one.id], role)
        if any(0 < sum(row[place] for row in split) > sum(row[place] for row in trial) < rules.floor
               for place in range(len(ROLES))):  # fmt: skip
            continue
        after = predictor.forecast(trial)
        if after is None or not _spares(now, after):
            continue
        worth = _worth(predictor, trial, rules) - LEAST_STEP * len(switches)
        if worth > most_worth:
            most_worth, best = worth, (switches, trial, after)
    return best


def _worth(predictor: Predictor, split: Split, rules: Rules) -> float:
    """Attainment of a split, also should one phase have more work than was seen: of two that would do, the one with
    more to spare where it is needed."""
    noise = trusted(predictor.noise, rules.trust)
    cases = ((1.0, 1.0), (1.0 + off(noise.prefill, noise, Z80), 1.0), (1.0, 1.0 + off(noise.decode, noise, Z80)))
    found = [predictor.forecast(split, prefill, decode) for prefill, decode in cases]
    return sum(one.attainment for one in found if one is not None) / len(cases)


def _singles(predictor: Predictor, taken: Mapping[InstanceId, Role], rules: Rules) -> list[Switch]:
    """One switch for each kind, from each role to each other; the least loaded instance of it. Mixed instances are made
    only where there are some."""
    present = [role for role in ROLES if role is not Role.MIXED or role in taken.values()]
    spare: dict[tuple[int, Role], Instance] = {}

    def preferred(one: Instance) -> tuple[int, float, str]:
        return (-1, 0.0, one.id) if one.id in rules.named else _load(one)

    for one in rules.movable:
        if taken.get(one.id) is not one.role:
            continue  # it moves already
        place = (predictor.kind_of(one.id), one.role)
        if place not in spare or preferred(one) < preferred(spare[place]):
            spare[place] = one
    return [(one, role) for (_, own), one in spare.items() for role in present if role is not own]


def _weigh(predictor: Predictor, first: Split, last: Split, switches: tuple[Switch, ...], rules: Rules) -> Advice:
    def gain(prefill: float, decode: float) -> float:
        after, before = predictor.forecast(last, prefill, decode), predictor.forecast(first, prefill, decode)
        return (after.attainment if after else 0.0) - (before.attainment if before else 0.0)

    before, after = predictor.forecast(first), predictor.forecast(last)
    assert before is not None
    assert after is not None
    middle = gain(1.0, 1.0)
    noise = trusted(predictor.noise, rules.trust)
    below, above = spread(gain, noise, Z80)
    doubt, _ = spread(gain, noise, SURE)
    duration_s = sum(rules.duration_s(one) for one, _ in switches)
    horizon_s, lost = max(rules.horizon_s, predictor.load.span_s), 0.0
    for one, _ in switches:
        without = predictor.forecast(_moved(first, predictor.kind_of(one.id), one.role, None))
        lost += rules.duration_s(one) * max(0.0, before.attainment - (without.attainment if without else 0.0))
    cost = lost / horizon_s + middle * min(1.0, duration_s / horizon_s)
    return Advice(
        switches=switches, before=before, after=after, gain=middle, low=middle - below, high=middle + above,
        sure=middle - doubt, cost=cost, duration_s=duration_s, window_s=predictor.load.span_s,
    )  # fmt: skip


def _gain(predictor: Predictor, roles: Mapping[InstanceId, Role], found: Advice) -> float:
    """What the same switches bring under another window."""
    wanted = dict(roles) | {one.id: role for one, role in found.switches}
    after, before = predictor.forecast(predictor.split(wanted)), predictor.forecast(predictor.split(roles))
    return (after.attainment if after else 0.0) - (before.attainment if before else 0.0)


def _spares(before: Forecast, after: Forecast) -> bool:
    """Whether no phase is made shorter than the other one was: else the way back would look as good at once."""
    worst = max(SPARE_USE, before.prefill_use, before.decode_use)
    return after.prefill_use <= worst and after.decode_use <= worst


def _sign(gain: float, least: float) -> int:
    return 1 if gain > least else -1 if gain < -least else 0


def _moved(split: Split, kind: int, source: Role, target: Role | None) -> Split:
    """One instance of the kind fewer in a role, and one more in another."""
    row = list(split[kind])
    row[ROLES.index(source)] -= 1
    if target is not None:
        row[ROLES.index(target)] += 1
    return (*split[:kind], (row[0], row[1], row[2]), *split[kind + 1 :])


def _load(one: Instance) -> tuple[int, float, str]:
    return (one.rows, one.queue_s(), one.id)


_LETTER = {Role.PREFILL: "P", Role.DECODE: "D", Role.MIXED: "M", Role.KV_POOL: "K"}
