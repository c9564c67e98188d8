"""Goodput and attainment by the book: counters since start, and sliding windows by completion time.

good request = finished normally within every objective of its class. attainment = good / (finished + server errors +
rejected + timed out + cancelled after TTFT was missed); classes without objectives are left out and shown apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from controlplane.core.buckets import Buckets, bucket_index
from controlplane.core.events import Ended
from controlplane.core.paces import Paces
from controlplane.core.stages import STAGES
from transfer.api import Goodput, Outcome, Quantiles, RequestRecord
from transfer.terms import Slo

WINDOW_S = 60
SHORT_WINDOW_S = 10
SLOT_S = 1.0


Key = TypeVar("Key", bound=Hashable)
Place = tuple[int | None, float]
"""Bucket index (None: that of zero) and value."""
OBJECTIVES = ("ttft", "tpot", "e2e")
Places = tuple[Place | None, Place | None, Place | None]
"""Of TTFT, TPOT and end-to-end time; None for what there is not."""


@dataclass(slots=True)
class Counts:
    """Everything that is counted over some span of time, for one class or all. Adds and subtracts exactly."""

    good: int = 0
    total: int = 0
    """What attainment divides by; 0 for a class without objectives."""
    finished: int = 0
    """Ended normally, good or not."""
    good_tokens: int = 0
    output_tokens: int = 0
    ttft_s: Buckets = field(default_factory=Buckets)
    tpot_s: Buckets = field(default_factory=Buckets)
    e2e_s: Buckets = field(default_factory=Buckets)
    missed_stage_us: list[int] = field(default_factory=lambda: [0] * len(STAGES))
    """Microseconds by stage of STAGES among counted requests that were not good."""
    missed_by: list[int] = field(default_factory=lambda: [0] * len(OBJECTIVES))
    """Of those, how many were over each of OBJECTIVES."""

    def add(self, record: RequestRecord, counted: bool, places: Places) -> None:
        """places: where its times go, see places_of."""
        good, num_output = record.good is True, record.output_tokens
        self.good += good
        self.total += counted
        self.finished += record.outcome == "ok"
        self.good_tokens += num_output * good
        self.output_tokens += num_output
        if counted and record.missed_by_s:
            self.missed_by = [num + (name in record.missed_by_s)
                              for name, num in zip(OBJECTIVES, self.missed_by, strict=True)]  # fmt: skip
        ttft, tpot, e2e = places
        if ttft is not None:
            self.ttft_s.add_to(*ttft)
        if tpot is not None:
            self.tpot_s.add_to(*tpot)
        if e2e is not None:
            self.e2e_s.add_to(*e2e)

    def unjudge(self) -> None:
        """Forget what depends on objectives; tokens, times and how many finished stay."""
        self.good = self.total = self.good_tokens = 0
        self.missed_stage_us = [0] * len(STAGES)
        self.missed_by = [0] * len(OBJECTIVES)

    def merge(self, other: Counts, sign: int = 1) -> None:
        self.good += sign * other.good
        self.total += sign * other.total
        self.finished += sign * other.finished
        self.good_tokens += sign * other.good_tokens
        self.output_tokens += sign * other.output_tokens
        for mine, theirs in ((self.ttft_s, other.ttft_s), (self.tpot_s, other.tpot_s), (self.e2e_s, other.e2e_s)):
            if sign > 0:
                mine.merge(theirs)
            else:
                mine.subtract(theirs)
        self.missed_stage_us = [a + sign * b for a, b in zip(self.missed_stage_us, other.missed_stage_us, strict=True)]
        self.missed_by = [a + sign * b for a, b in zip(self.missed_by, other.missed_by, strict=True)]


class Window(Generic[Key]):
    """A sliding sum over the last `span` slots of one second, by completion time. Bounded by its span. Key: a class, or
    a model and a class."""

    def __init__(self, span: int) -> None:
        self.span = span
        self._slots: deque[tuple[int, dict[Key, Counts]]] = deque()
        self.by_class: dict[Key, Counts] = {}
        self._fleet: deque[tuple[int, float, float]] = deque()
        """(slot, GPU seconds, cost), one for each slot."""
        self.gpu_s = self.dollars = 0.0

    def add(
        self, slot: int, name: Key, record: RequestRecord, counted: bool, missed_us: list[int], places: Places
    ) -> None:
        """missed_us: by stage; empty where nothing was missed."""
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, {}))
        for by_class in (self._slots[-1][1], self.by_class):
            counts = by_class.get(name)
            if counts is None:
                counts = by_class[name] = Counts()
            counts.add(record, counted, places)
            if missed_us:
                counts.missed_stage_us = [a + b for a, b in zip(counts.missed_stage_us, missed_us, strict=True)]

    def spend(self, since_s: float, until_s: float, num_gpus: int, dollars_per_s: float) -> None:
        """The fleet between two times: booked to the slots it falls into, so that expiry is exact."""
        first = max(since_s, (until_s // SLOT_S - self.span) * SLOT_S)
        while first < until_s:
            slot = int(first // SLOT_S)
            last = min(until_s, (slot + 1) * SLOT_S)
            gpu_s, dollars = (last - first) * num_gpus, (last - first) * dollars_per_s
            if self._fleet and self._fleet[-1][0] == slot:
                _, before_s, before = self._fleet.pop()
                self._fleet.append((slot, before_s + gpu_s, before + dollars))
            else:
                self._fleet.append((slot, gpu_s, dollars))
            self.gpu_s += gpu_s
            self.dollars += dollars
            first = last

    def starts_s(self, slot: int) -> float:
        """Where the window begins when `slot` is the present one."""
        return (slot - self.span + 1) * SLOT_S

    def expire(self, slot: int) -> None:
        """Let go of what is older than the span."""
        while self._slots and self._slots[0][0] <= slot - self.span:
            for name, counts in self._slots.popleft()[1].items():
                self.by_class[name].merge(counts, -1)
        while self._fleet and self._fleet[0][0] <= slot - self.span:
            self._fleet.popleft()
        self.gpu_s = sum([one[1] for one in self._fleet])
        self.dollars = sum([one[2] for one in self._fleet])

    def unjudge(self, name: Key) -> None:
        """One class is judged anew from now on."""
        for by_class in (self.by_class, *(one[1] for one in self._slots)):
            if name in by_class:
                by_class[name].unjudge()

    def attainment(self) -> float | None:
        """Good / counted in the span; None before any counts."""
        total = sum(one.total for one in self.by_class.values())
        return sum(one.good for one in self.by_class.values()) / total if total else None

    def everything(self) -> Counts:
        counts = Counts()
        for one in self.by_class.values():
            counts.merge(one)
        return counts


class Probe:
    """Counts what finishes from `since_s` on: the measurement of a plan's effect."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.counts = Counts()


class GoodputCore:
    """Knows every finished request once. `now` is loop time; slots of a window are whole seconds of it."""

    def __init__(self, classes: dict[str, Slo | None]) -> None:
        self._classes = dict(classes)
        self.by_class = {name: Counts() for name in classes}
        self.by_model: dict[str, dict[str, Counts]] = {}
        """By model and class; of models that had a request."""
        self.outcomes: dict[tuple[str, Outcome], int] = {}
        self.windows: dict[int, Window[str]] = {span: Window(span) for span in (SHORT_WINDOW_S, WINDOW_S)}
        self._models: Window[tuple[str, str]] = Window(WINDOW_S)
        self.usual_output: dict[str, float] = {}
        self.usual_hold_s = 0.0
        self.probes: list[Probe] = []
        self.paces = Paces(WINDOW_S)
        self._started_s: float | None = None
        self._judged_s: dict[str, float] = {}
        """When objectives were changed, by class."""
        self._slot = 0
        self._spent_s: float | None = None
        self._rates = (0, 0.0)

    def finished(self, record: RequestRecord, missed_s: dict[str, float], now: float, hold_s: float = 0.0) -> None:
        """Count one finished request. missed_s: its stages, for the bottleneck among those that were not good.
        hold_s: how long its last decode instance held blocks for it."""
        self.advance(now)
        name, slo = record.traffic_class, self._classes.get(record.traffic_class)
        counted = slo is not None and counts_for_attainment(record, slo)
        missed = counted and not record.good
        missed_us = [round(missed_s.get(stage, 0.0) * 1e6) for stage in STAGES] if missed else []
        places = places_of(record)
        by_class = self.by_model.setdefault(record.model, {})
        for counts in (self.by_class.setdefault(name, Counts()), by_class.setdefault(name, Counts())):
            counts.add(record, counted, places)
        self.outcomes[name, record.outcome] = self.outcomes.get((name, record.outcome), 0) + 1
        for window in self.windows.values():
            window.add(self._slot, name, record, counted, missed_us, places)
        self._models.add(self._slot, (record.model, name), record, counted, [], places)
        for probe in self.probes:
            probe.counts.add(record, counted, places)
        if record.decode is not None and (tpot := places[1]) is not None:
            self.paces.add(self._slot, record.decode, *tpot)
        if record.outcome == "ok":
            before = self.usual_output.get(name, float(record.output_tokens))
            self.usual_output[name] = 0.9 * before + 0.1 * record.output_tokens
            self.usual_hold_s = 0.9 * (self.usual_hold_s or hold_s) + 0.1 * hold_s

    def judge(self, name: str, slo: Slo | None, since_s: float | None = None) -> None:
        """Other objectives for one class: its good and counted requests, since start and in the windows, begin at 0.
        since_s: when they were changed; None where they are in force from the start."""
        self._classes[name] = slo
        if since_s is not None:
            self._judged_s[name] = since_s
        self.by_class[name].unjudge()
        for window in self.windows.values():
            window.unjudge(name)
        for model, by_class in self.by_model.items():
            if name in by_class:
                by_class[name].unjudge()
            self._models.unjudge((model, name))

    def advance(self, now: float) -> None:
        """Time passed: expire slots."""
        if self._started_s is None:
            self._started_s = now
        slot = int(now // SLOT_S)
        if slot != self._slot:
            self._slot = slot
            self.paces.expire(slot)
            for window in self.windows.values():
                window.expire(slot)
            self._models.expire(slot)

    def spend(self, num_gpus: int, dollars_per_hour: float, now: float) -> None:
        """The serving fleet from now on, told at every change of it; what it cost until now is booked."""
        self.advance(now)
        if self._spent_s is not None and now > self._spent_s:
            gpus, dollars = self._rates
            for window in self.windows.values():
                window.spend(self._spent_s, now, gpus, dollars / 3600)
        self._spent_s, self._rates = now, (num_gpus, dollars_per_hour)

    def goodput(self, span: int, now: float) -> Goodput:
        """Rates over the window, as `span_s` has it; what a class that is judged anew does in its shorter one stands
        for the whole window. GPU time and cost are those of the fleet as it was, exact up to `now`; reading books
        nothing."""
        self.advance(now)
        window = self.windows[span]
        over_s = self.span_s(span, now)
        shares = [(over_s / self.span_s(span, now, name), counts) for name, counts in window.by_class.items()]
        good = sum(share * counts.good for share, counts in shares)
        good_tokens = sum(share * counts.good_tokens for share, counts in shares)
        finished = sum(counts.finished for _, counts in shares)
        booked_s = self._spent_s if self._spent_s is not None else now
        since_s = max(0.0, now - max(booked_s, window.starts_s(self._slot)))
        gpu_s = window.gpu_s + since_s * self._rates[0]
        dollars = window.dollars + since_s * self._rates[1] / 3600
        return Goodput(
            per_s=good / over_s, per_gpu=good / gpu_s if gpu_s > 0 else 0.0, window_s=float(span),
            tokens_per_s=good_tokens / over_s, throughput_per_s=finished / over_s,
            per_dollar=good / dollars if dollars > 0 else None,
            cost_per_good=dollars / good if good else None,
        )  # fmt: skip

    def span_s(self, span: int, now: float, name: str | None = None) -> float:
        """What rates of a window divide by: the time since start where that is shorter, at least a second. For what is
        judged of one class, the time since its objectives were changed, likewise."""
        started_s = now if self._started_s is None else self._started_s
        return min(float(span), max(1.0, now - (started_s if name is None else self._judged_s.get(name, started_s))))

    def models(self, served: Iterable[str]) -> list[str]:
        """Those that are served or had a request, where there are several to tell apart."""
        names = sorted({*served, *self.by_model})
        return names if len(names) > 1 else []

    def of_model(self, model: str, now: float) -> tuple[Counts, Counts, float]:
        """One model, all classes: since start, in the long window, and its goodput there."""
        self.advance(now)
        since_start, recent, per_s = Counts(), Counts(), 0.0
        for name, counts in self.by_model.get(model, {}).items():
            since_start.merge(counts)
            found = self._models.by_class.get((model, name))
            if found is not None:
                recent.merge(found)
                per_s += found.good / self.span_s(WINDOW_S, now, name)
        return since_start, recent, per_s

    def judged_for_s(self, name: str, now: float) -> float | None:
        """How long ago the objectives of a class were changed; None where they are those of the start."""
        changed_s = self._judged_s.get(name)
        return None if changed_s is None else max(0.0, now - changed_s)

    def attainment(self, name: str | None = None) -> float | None:
        """Share of good requests since start, of one class or all with objectives; None before any counts."""
        chosen = [name] if name is not None else list(self.by_class)
        good = sum(self.by_class[one].good for one in chosen if self._classes.get(one) is not None)
        total = sum(self.by_class[one].total for one in chosen)
        return good / total if total else None

    def missed_stages(self, now: float) -> dict[str, float]:
        """Seconds by stage among counted requests of the long window that missed, largest first."""
        self.advance(now)
        totals = self.windows[WINDOW_S].everything().missed_stage_us
        found = {stage: micros / 1e6 for stage, micros in zip(STAGES, totals, strict=True) if micros}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def missed_by(self, now: float) -> dict[str, int]:
        """How many requests of the long window were over each objective, the most first."""
        self.advance(now)
        found = zip(OBJECTIVES, self.windows[WINDOW_S].everything().missed_by, strict=True)
        return dict(sorted(((name, num) for name, num in found if num), key=lambda item: -item[1]))

    def probe(self, now: float) -> Probe:
        probe = Probe(now)
        self.probes.append(probe)
        return probe

    def end_probe(self, probe: Probe) -> Counts:
        """Stop counting for it. Idempotent."""
        if probe in self.probes:
            self.probes.remove(probe)
        return probe.counts


def places_of(record: RequestRecord) -> Places:
    """Where a record's times are counted: worked out once for all that count it."""
    return _place(record.ttft_s), _place(record.tpot_s), _place(record.e2e_s if record.outcome == "ok" else None)


def _place(value: float | None) -> Place | None:
    if value is None:
        return None
    return (bucket_index(value), value) if value > 0.0 else (None, 0.0)


def is_good(record: RequestRecord | Ended, slo: Slo | None) -> bool | None:
    """Whether it finished normally within every objective; None for a class without any."""
    if slo is None:
        return None
    return (
        record.outcome == "ok"
        and record.ttft_s is not None
        and record.ttft_s <= slo.ttft_s
        and (record.output_tokens <= 1 or record.tpot_s is None or record.tpot_s <= slo.tpot_s)
        and (slo.e2e_s is None or record.e2e_s <= slo.e2e_s)
    )


def missed_by_s(record: RequestRecord | Ended, slo: Slo | None) -> dict[str, float]:
    """Objectives that were missed, each with the seconds above it; what was not measured is left out."""
    if slo is None:
        return {}
    tpot_s = record.tpot_s if record.output_tokens > 1 else None
    measured = (("ttft", record.ttft_s, slo.ttft_s), ("tpot", tpot_s, slo.tpot_s), ("e2e", record.e2e_s, slo.e2e_s))
    return {name: value - limit for name, value, limit in measured
            if value is not None and limit is not None and value > limit}  # fmt: skip


def counts_for_attainment(record: RequestRecord, slo: Slo) -> bool:
    """Everything but a client's cancel; that counts only when TTFT was missed already."""
    if record.outcome != "cancelled":
        return True
    return (record.e2e_s if record.ttft_s is None else record.ttft_s) > slo.ttft_s


def quantiles(buckets: Buckets) -> Quantiles:
    return Quantiles(p50=buckets.quantile(0.5), p90=buckets.quantile(0.9), p99=buckets.quantile(0.99))
