"""What a fleet in given roles would do with recorded traffic: a closed-form estimate, with its interval.

Prefill instances, and the requests that decode instances can run within the pace wanted and their KV room, are queues
of k servers whose arrivals are turned away when they cannot be in time, as admission does (queues.py; DistServe,
OSDI'24, 3.1 uses M/D/1). Instances of a kind, by latency profile, KV room and speed, are counted together; load is
split by capacity, and decode at the pace that all kinds share, as placement does.
Says nothing (None, and why) where there was too little traffic. Decides nothing (moves.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from controlplane.core.config import CoreConfig
from controlplane.core.fleet import Group
from controlplane.core.instance import Instance
from controlplane.core.intervals import Z80, Noise, Trust, spread, trusted
from controlplane.core.kinds import ROLES, Bin, Kind, bins_of, cv2, group_alike, kind_of, usual_speeds
from controlplane.core.placement import CERTAINTY
from controlplane.core.queues import Pace, Queue, Server, capacity, keeps_pace, pace
from controlplane.core.traffic import Arrival, Load, Traffic
from transfer.api import Prediction
from transfer.said import Said, say
from transfer.terms import InstanceId, Role, Slo

DEFAULT_ERROR = 0.1
"""Relative error of predicted step times where nobody measured it."""
MIN_MEASURED = 10
MAX_STRETCH = 50.0

Split = tuple[tuple[int, int, int], ...]
"""How many instances of each kind have each of ROLES."""
Bumps = list[tuple[float, float]]
"""Of mixed instances: share of all that decode, and what prompts there add to the pace, as keeps_pace takes it."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """attainment: share of offered requests that would be good. Utilisations above 1 mean overload."""

    rate_per_s: float
    attainment: float
    ttft_p50_s: float
    tpot_p50_s: float
    prefill_use: float
    decode_use: float

    @property
    def goodput_per_s(self) -> float:
        return self.rate_per_s * self.attainment


class Predictor:
    """Forecasts for one model's instances under one window of traffic; figures are shared between forecasts."""

    def __init__(
        self, instances: Sequence[Instance], load: Load, slos: Mapping[str, Slo | None],
        config: CoreConfig | None = None,
    ) -> None:  # fmt: skip
        """load: at least one shape. Instances are engines of one model, in any state but lost."""
        self.load, self.instances = load, instances
        self._config = config or CoreConfig()
        self._bins = bins_of(load.shapes, slos)
        self.counted = sum(one.share for one in self._bins if one.slo is not None)
        """Share of the requests that have objectives."""
        outputs = [float(shape.output_tokens or 1) for shape in load.shapes]
        total = sum(outputs)
        self.output_tokens = total / len(outputs)
        self._context = sum(
            output * (shape.prompt_tokens + output / 2) for output, shape in zip(outputs, load.shapes, strict=True)
        ) / total  # fmt: skip
        self.compute_tokens = sum(max(0, shape.prompt_tokens - shape.cached_tokens) for shape in load.shapes) / len(
            outputs
        )
        """Of a mean prompt; output_tokens of a mean request."""
        self._decode_scatter = (load.burst + cv2([(1.0, output) for output in outputs])) / 2
        self._slos = {one.slo.tpot_s for one in self._bins if one.slo is not None}
        self._patience = _patience(self._bins)
        usual = usual_speeds(instances)
        self.kinds = [kind_of(members, usual, self._bins, self._context) for members in group_alike(instances)]
        self._known: dict[tuple[Split, float, float], Forecast | None] = {}
        self.factors = (1.0, 1.0)
        """On the work of prefill and of decode in every forecast: what was measured of them (`correct`)."""
        self._kind_of = {one.id: index for index, kind in enumerate(self.kinds) for one in kind.members}

    def split(self, roles: Mapping[InstanceId, Role]) -> Split:
        """The instances counted by kind and role, those that are set aside left out."""
        counts = [[0, 0, 0] for _ in self.kinds]
        for one in self.instances:
            if not one.held:
                counts[self._kind_of[one.id]][ROLES.index(roles[one.id])] += 1
        return tuple((row[0], row[1], row[2]) for row in counts)

    def kind_of(self, instance_id: InstanceId) -> int:
        return self._kind_of[instance_id]

    @property
    def noise(self) -> Noise:
        """What the window leaves uncertain. Work is a compound sum: its relative variance is (burst + cv^2) / num."""
        num = max(1, self.load.num)
        errors = [one.profile.error for one in self.instances]
        return Noise(
            prefill=math.sqrt((self.load.burst + max(kind.work_cv2 for kind in self.kinds)) / num),
            decode=math.sqrt(2 * self._decode_scatter / num),
            model=max((DEFAULT_ERROR if error is None else error for error in errors), default=DEFAULT_ERROR),
        )

    def forecast(self, split: Split, prefill: float = 1.0, decode: float = 1.0) -> Forecast | None:
        """prefill, decode: factors on the work of a phase. None when nobody serves one."""
        name = (split, prefill * self.factors[0], decode * self.factors[1])
        if name not in self._known:
            serves = any(row[1] or row[2] for row in split)
            if not any(row[0] or row[2] for row in split):  # then decode computes the prompts, if it may
                serves = serves and self._config.without_prefill == "serve_on_decode"
                split = tuple((0, 0, row[1]) for row in split)
            self._known[name] = self._forecast(split, *name[1:]) if serves else None
        return self._known[name]

    def correct(self, split: Split, good: int, counted: int, least: float, most: float) -> None:
        """Let the busier phase have as much more or less work as makes this split come out as it was measured: `good`
        of `counted` requests. The factor stays between least and most; what chance explains corrects nothing."""
        found = self.forecast(split)
        if found is None or counted < MIN_MEASURED:
            return
        measured = good / counted
        chance = 0.02 + 2 * math.sqrt(max(0.01, measured * (1 - measured)) / counted)
        bound = most if measured < found.attainment - chance else least if measured > found.attainment + chance else 1.0
        if bound == 1.0:
            return
        place, before = (0 if found.prefill_use >= found.decode_use else 1), self.factors
        low, high = sorted((1.0, bound))
        for _ in range(5):
            middle = math.sqrt(low * high)
            self.factors = (before[0] * middle, before[1]) if place == 0 else (before[0], before[1] * middle)
            now = self.forecast(split)
            low, high = (middle, high) if now is not None and now.attainment > measured else (low, middle)

    def _forecast(self, split: Split, prefill: float, decode: float) -> Forecast:
        rate = self.load.rate_per_s
        tokens_per_s = rate * self.output_tokens * decode
        compute, servers, usual, bumps = self._phases(split, rate * prefill, tokens_per_s)
        slots = {tpot_s: self._slots(servers, usual, tokens_per_s, tpot_s) for tpot_s in self._slos}
        queue = compute.queue
        # Admission turns away before any work is done, so the wider phase sees only what the narrower one lets pass.
        refused = queue.loss(self._patience)
        lost = min((one.loss(self._patience) for one in slots.values()), default=0.0)
        if lost > refused:
            queue = queue.scaled(1.0 - lost)
        else:
            slots = {
                tpot_s: self._slots(servers, usual, tokens_per_s * (1.0 - refused), tpot_s) for tpot_s in self._slos
            }
        good = ttft = 0.0
        for place, one in enumerate(self._bins):
            for share, before_s in compute.shares:
                fixed_s = before_s[place] + usual.step_s
                ttft += one.share * share * fixed_s
                if one.slo is not None:
                    good += one.share * share * _good(one, fixed_s, queue, slots[one.slo.tpot_s], usual.step_s, bumps)
        waits_s = compute.queue.median_wait_s(self._patience)
        return Forecast(
            rate_per_s=rate, attainment=min(1.0, good / self.counted) if self.counted else 0.0,
            ttft_p50_s=ttft + waits_s, tpot_p50_s=usual.step_s, prefill_use=compute.queue.use,
            decode_use=self._use(servers, tokens_per_s, usual.use),
        )  # fmt: skip

    # --- phases -----------------------------------------------------------------------------------------------

    def _phases(self, split: Split, rate: float, tokens_per_s: float) -> tuple[_Compute, list[Server], Pace, Bumps]:
        """Both phases; where instances are mixed, each takes from the other, found in a few rounds."""
        mixed = any(row[2] for row in split)
        slowed, stretch = [1.0] * len(self.kinds), [1.0] * len(self.kinds)
        for _ in range(3 if mixed else 1):
            compute = self._compute(split, rate, slowed)
            usual = pace(self._servers(split, stretch, even=True), tokens_per_s)
            bumps = []
            for index, (kind, row) in enumerate(zip(self.kinds, split, strict=True)):
                if not row[2]:
                    continue
                rows = kind.decode.within(min(usual.step_s, *self._slos, math.inf) / stretch[index])
                step_s, busy = kind.decode.at(rows), min(1.0, compute.queue.use)
                beside_s = max(0.0, step_s - kind.idle_s)
                slowed[index] = 1.0 + beside_s / kind.chunk_s
                long_s = kind.chunk_s + beside_s
                stretch[index] = min(MAX_STRETCH, 1.0 / (busy * step_s / long_s + (1.0 - busy)))
                chunks = max(1.0, self.compute_tokens / kind.instance.hello.token_budget)
                bump = busy / long_s * kind.chunk_s**2 * chunks
                bumps.append((row[2] / sum(row[1] + row[2] for row in split), bump))
        return compute, self._servers(split, stretch, even=False), usual, bumps

    def _compute(self, split: Split, rate: float, slowed: list[float]) -> _Compute:
        """The queue of prompts, and what each kind of prefill instance takes of it, with the KV time that shows."""
        parts: list[tuple[float, Kind, Role]] = []
        num, per_s, squares = 0, 0.0, 0.0
        for index, (kind, row) in enumerate(zip(self.kinds, split, strict=True)):
            for count, role, slow in ((row[0], Role.PREFILL, 1.0), (row[2], Role.MIXED, slowed[index])):
                if not count:
                    continue
                mean_s = max(1e-9, kind.mean_work_s * kind.speed[role] * slow)
                parts.append((count / mean_s, kind, role))
                num, per_s = num + count, per_s + count / mean_s
                squares += count / mean_s * kind.work_cv2
        queue = Queue(rate / per_s, num, num / per_s, (self.load.burst + squares / per_s) / 2)
        links = [(sum(row), kind) for row, kind in zip(split, self.kinds, strict=True) if row[1] or row[2]]
        return _Compute(queue, [
            (part / per_s, self._before_s(kind, role, links, rate * part / per_s / num)) for part, kind, role in parts
        ])  # fmt: skip

    def _before_s(self, kind: Kind, role: Role, decodes: list[tuple[int, Kind]], rate_per_s: float) -> list[float]:
        """Of each bin, what passes before decode can begin, waits left out: computing, and the time that its KV takes
        beyond what computing hides; the last layer's share always shows."""
        layout = kind.instance.hello.layout
        if role is Role.MIXED or layout is None:
            return [compute_s * kind.speed[role] for compute_s in kind.compute_s]
        num_bytes = max(float(layout.token_bytes), kind.instance.profile.shape.kv_token_bytes)
        count = sum(num for num, _ in decodes)
        byte_s = sum(num * self._byte_s(kind.instance, other.instance) for num, other in decodes) / max(1, count)
        moved = sum(one.share * one.prompt_tokens for one in self._bins) * num_bytes
        busy = min(0.9, rate_per_s * moved * byte_s)
        found = []
        for one, compute_s in zip(self._bins, kind.compute_s, strict=True):
            transfer_s = one.prompt_tokens * num_bytes * byte_s / (1.0 - busy)
            last_s = transfer_s / layout.num_layers
            own_s = compute_s * kind.speed[role]
            found.append(own_s + last_s + max(0.0, transfer_s - last_s - own_s))
        return found

    def _byte_s(self, one: Instance, other: Instance) -> float:
        """Seconds a byte takes between them."""
        link = min(one.hello.hardware.link_bytes_per_s, other.hello.hardware.link_bytes_per_s)
        link *= one.profile.link_efficiency
        same_host = one.hello.host_id == other.hello.host_id and one is not other
        return 1.0 / max(1.0, max(link, self._config.same_host_bytes_per_s) if same_host else link)

    def _servers(self, split: Split, stretch: list[float], even: bool) -> list[Server]:
        """even: as if prompts slowed every request down alike."""
        found = []
        for index, (kind, row) in enumerate(zip(self.kinds, split, strict=True)):
            if row[1]:
                found.append(Server(row[1], kind.decode, kind.speed[Role.DECODE]))
            if row[2]:
                every, other = (stretch[index], 1.0) if even else (1.0, stretch[index])
                found.append(Server(row[2], kind.decode, kind.speed[Role.MIXED] * every, other))
        return found

    def _slots(self, servers: list[Server], usual: Pace, tokens_per_s: float, tpot_s: float) -> Queue:
        """The requests that may run within a pace, as servers of a queue."""
        tokens, rows = capacity(servers, tpot_s)
        if rows <= 0:
            return Queue(math.inf, 0, 0.0)
        use = tokens_per_s / tokens
        if use < 1.0 and usual.rows < rows:
            use = min(use, usual.rows / rows)
        return Queue(use, rows, self.output_tokens * rows / tokens, self._decode_scatter)

    def _use(self, servers: list[Server], tokens_per_s: float, anyhow: float) -> float:
        """Decode's load over what it can do at the tightest pace wanted; `anyhow` where none is."""
        if not self._slos:
            return anyhow
        tokens, _ = capacity(servers, min(self._slos))
        return tokens_per_s / tokens if tokens > 0 else (0.0 if tokens_per_s <= 0 else MAX_STRETCH)


class _Compute(NamedTuple):
    """shares: by kind and role, the share of the prompts and the time of each bin before decode can begin."""

    queue: Queue
    shares: list[tuple[float, list[float]]]


def forecast(
    instances: Sequence[Instance], roles: Mapping[InstanceId, Role], shapes: Sequence[Arrival], rate_per_s: float,
    slos: Mapping[str, Slo | None],
) -> Forecast | None:  # fmt: skip
    """The fleet with these roles under `rate_per_s` requests of these shapes; None when a phase has no instance."""
    if not shapes or not instances:
        return None
    num = max(1, round(rate_per_s * 60.0))
    predictor = Predictor(instances, Load(num, num / rate_per_s if rate_per_s > 0 else math.inf, tuple(shapes)), slos)
    return predictor.forecast(predictor.split(roles))


def predict(
    config: CoreConfig, group: Group | None, roles: Mapping[InstanceId, Role], traffic: Traffic, now: float,
    trust: Trust | None = None,
) -> Prediction:  # fmt: skip
    """Goodput of a model's group after its instances take `roles`, from the recorded traffic."""
    if group is None:
        return unknown(say("basis.no_engine"))
    load = traffic.load(now, group.model.name, pace=pace_of(group))
    if load.num < config.min_traffic or not load.shapes:
        return unknown(say("basis.few", num=load.num, seconds=f"{load.span_s:.0f}", needed=config.min_traffic))
    predictor = Predictor(group.members, load, config.classes, config)
    split = predictor.split(roles)
    found = predictor.forecast(split)
    if found is None:
        return unknown(say("basis.no_phase"))
    return prediction(predictor, split, found, config, trust)


def prediction(
    predictor: Predictor, split: Split, found: Forecast, config: CoreConfig, trust: Trust | None = None
) -> Prediction:  # fmt: skip
    """A forecast as the API shows it, with an 80 % interval."""
    goodput, load, noise = found.goodput_per_s, predictor.load, trusted(predictor.noise, trust)
    low, high = spread(lambda p, d: _attainment(predictor.forecast(split, p, d)), noise, Z80)
    # The rate of the load itself, and the chance in the window that the effect will be measured in.
    chance = Z80 * math.sqrt(load.burst * (goodput / load.span_s + goodput / config.measure_s))
    gpus = sum(one.num_gpus for one in predictor.instances)
    dollars_per_s = sum(one.hello.hardware.price_per_hour for one in predictor.instances) / 3600
    provenance = sorted({_provenance(one, load.shapes) for one in predictor.instances})
    basis = say("basis.arrivals", num=load.num, seconds=f"{load.span_s:.0f}", prefill=f"{found.prefill_use:.0%}",
                decode=f"{found.decode_use:.0%}", error=f"{noise.model:.0%}",
                provenance=tuple(say(f"provenance.{one}") for one in provenance))  # fmt: skip
    return Prediction(
        goodput_per_s=goodput,
        goodput_low=max(0.0, goodput - math.hypot(chance, low * load.rate_per_s)),
        goodput_high=goodput + math.hypot(chance, high * load.rate_per_s),
        ttft_p50_s=found.ttft_p50_s, tpot_p50_s=found.tpot_p50_s, attainment=found.attainment,
        goodput_per_gpu=goodput / gpus if gpus else None,
        goodput_per_dollar=goodput / dollars_per_s if dollars_per_s > 0 else None,
        basis=str(basis), said=basis,
    )  # fmt: skip


def unknown(why: Said) -> Prediction:
    """None, and why."""
    return Prediction(basis=str(why), said=why)


def _provenance(one: Instance, shapes: Sequence[Arrival]) -> str:
    """Of the step times for these prompts."""
    longest = max(shapes, key=lambda shape: shape.prompt_tokens)
    cached = min(longest.cached_tokens, longest.prompt_tokens)
    found = one.profile.prefill_provenance(longest.prompt_tokens - cached, cached, one.hello.token_budget)
    return found if found in CERTAINTY else "unknown"  # a node may declare any


def pace_of(group: Group) -> dict[InstanceId, float]:
    """The step time that each decode instance last told."""
    return {one.id: one.load.step_s for one in group.members}


# --- helpers --------------------------------------------------------------------------------------------------


def _attainment(found: Forecast | None) -> float:
    return found.attainment if found is not None else 0.0


def _good(one: Bin, fixed_s: float, prompts: Queue, slots: Queue, step_s: float, bumps: Bumps) -> float:
    """Chance that a request of this size is good."""
    assert one.slo is not None
    tpot_s, output = one.slo.tpot_s, one.output_tokens
    paced = 1.0
    for share, bump in bumps:
        paced -= share * (1.0 - keeps_pace(tpot_s, step_s, bump, output))
    slack_s = one.slo.ttft_s - fixed_s
    if one.slo.e2e_s is not None:
        slack_s = min(slack_s, one.slo.e2e_s - fixed_s - one.output_tokens * step_s)
    return paced * (1.0 - prompts.loss(slack_s)) * (1.0 - slots.loss(slack_s))


def _patience(bins: Sequence[Bin]) -> float:
    """The usual TTFT objective: how long the requests that count wait before they are given up."""
    counted = [(one.share, one.slo.ttft_s) for one in bins if one.slo is not None]
    total = sum(share for share, _ in counted)
    return sum(share * ttft_s for share, ttft_s in counted) / total if total else math.inf
