"""Predicts, for one request, what each way of serving it would cost: queue, compute, transfer, pace, KV room.

Pure arithmetic over LatencyProfile, charged load and the directory. Chooses nothing (placement.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from heapq import nsmallest
from typing import Any

from controlplane.core.config import CoreConfig
from controlplane.core.directory import Match
from controlplane.core.fetching import Fetch, Overlap, Path, best_fetch
from controlplane.core.fleet import Group
from controlplane.core.instance import US, Charge, Instance
from controlplane.core.placement import Candidate, Wanted
from transfer.terms import InstanceId, KvLayout

MAX_SOURCES = 2
"""Pools that are weighed as the source of one request's KV."""

Matches = Mapping[InstanceId, Match]
"""Leading whole blocks that an instance holds of the request, by instance."""


class PrefillOption:
    """compute_s: computing. prefill_s: fetching, too, where there is a fetch. cached_tokens: those fetched included."""

    __slots__ = ("cached_tokens", "compute_s", "compute_tokens", "fetch", "instance", "prefill_s", "queue_s")

    def __init__(
        self, instance: Instance, fetch: Fetch | None, cached_tokens: int, queue_s: float, prefill_s: float,
        compute_tokens: int, compute_s: float,
    ) -> None:  # fmt: skip
        self.instance, self.fetch, self.cached_tokens, self.queue_s = instance, fetch, cached_tokens, queue_s
        self.prefill_s, self.compute_tokens, self.compute_s = prefill_s, compute_tokens, compute_s

    @property
    def compute_us(self) -> int:
        """As charged: by the profile alone."""
        return round(self.compute_s / self.instance.speed * US)

    @property
    def done_s(self) -> float:
        return self.queue_s + self.prefill_s


class Estimator:
    """Weighs one request against one model's group. Made for each decision, so that repeated figures are shared.

    fetches: whether KV may come from a pool.
    """

    def __init__(self, config: CoreConfig, group: Group, wanted: Wanted, matches: Matches, now: float | None = None,
                 fetches: bool = True) -> None:  # fmt: skip
        """now: loop time, from which work under way is aged; None: nothing is taken as done before it is heard."""
        self._config, self._group, self._wanted, self._matches = config, group, wanted, matches
        self._now, self.fetches = now, fetches
        self._memo: dict[tuple[int, int, int], float] = {}
        self._steps: dict[InstanceId, float] = {}
        self._token_bytes: dict[int, float] = {}
        self._block_size = group.layout.block_size
        self._max_match = most = max(0, wanted.num_tokens - 1) // self._block_size
        self._held = {name: min(match.lead, most) * self._block_size for name, match in matches.items()}
        context = wanted.num_tokens + int(wanted.usual_output) // 2
        self._decode_charge = Charge(0, 0, 1, context, wanted.keep_blocks, wanted.tpot_us)
        self._sources: list[tuple[Instance, Match]] | None = None

    # --- who may be asked at all ----------------------------------------------------------------------------

    def open_prefills(self) -> list[Instance]:
        """Prefill instances for this request, however long their queues; those that failed it only without others."""
        unfit, prefills = self._wanted.unfit, self._group.prefills
        return self._untried([one for one in prefills if one.id not in unfit] if unfit else prefills)

    def open_decodes(self, instances: Sequence[Instance]) -> list[Instance]:
        """Those of `instances` that have room for it now; those that failed it only without others."""
        unfit, need, share = self._wanted.unfit, self._wanted.need_blocks, self._config.room_watermark
        return self._untried([
            one for one in instances
            if one.free_blocks - one.pending_blocks >= need + (int(one.hello.num_blocks * share) + 1 if one.rows else 0)
            and not one.full and one.id not in unfit
        ])  # fmt: skip

    def _untried(self, instances: list[Instance]) -> list[Instance]:
        avoid = self._wanted.avoid
        if not avoid:
            return instances
        fewest = min((avoid.get(one.id, 0) for one in instances), default=0)
        return [one for one in instances if avoid.get(one.id, 0) == fewest]

    def prefills(self, every: bool = False) -> list[PrefillOption]:
        """The best few prefill instances that take work now (or of every one), each with its best KV source."""
        tokens = self._wanted.num_tokens - 1
        rows = []
        for one in self.open_prefills():
            if every or self.takes_work(one):
                held = self._held.get(one.id, 0)
                queue_s, compute_s = self.queue_s(one), self.compute_s(one, tokens - held, held)
                rows.append((queue_s + compute_s, one.picked, one.id, -held, one, queue_s, compute_s))
        return [self._option(one, tokens, queue_s, compute_s) for *_, one, queue_s, compute_s in self._few(rows)]

    def decodes(self, instances: Sequence[Instance] | None = None) -> list[Instance]:
        """The best few decode instances, or of those given, with room."""
        return self._best_decodes(self._group.decodes if instances is None else instances)

    def mixed(self) -> list[Instance]:
        """The best few mixed instances with room that take work now."""
        return self._best_decodes([one for one in self._group.mixed if self.takes_work(one)])

    # --- one way to serve it --------------------------------------------------------------------------------

    def pair(self, option: PrefillOption, decode: Instance) -> Candidate:
        """Prefill here, decode there."""
        wanted, prefill = self._wanted, option.instance
        transfer_s = self.transfer_s(prefill, decode)
        exposed_s = self.exposed_s(prefill, transfer_s, option.prefill_s)
        step_s = self.step_s(decode)
        return Candidate(
            decode=decode, prefill=prefill, fetch=option.fetch, compute_tokens=option.compute_tokens,
            cached_tokens=option.cached_tokens, queue_s=option.queue_s, prefill_s=option.prefill_s,
            transfer_s=transfer_s, ttft_s=option.done_s + exposed_s + step_s, tpot_s=self._pace(decode, step_s, 0.0),
            short_blocks=wanted.keep_blocks - decode.room, faults=self._faults(prefill, decode),
            charge_prefill=Charge(option.compute_tokens, option.compute_us, 1),
            charge_decode=self._decode_charge,
        )  # fmt: skip

    def local(self, decode: Instance) -> Candidate:
        """One instance computes the prompt and decodes."""
        option, step_s = self.option(decode, alone=True), self.step_s(decode)
        return Candidate(
            decode=decode, prefill=None, fetch=option.fetch, compute_tokens=option.compute_tokens,
            cached_tokens=option.cached_tokens, queue_s=option.queue_s, prefill_s=option.prefill_s, transfer_s=0.0,
            ttft_s=option.done_s + (step_s if decode.rows else 0.0),
            tpot_s=self._pace(decode, step_s, option.compute_s),
            short_blocks=self._wanted.keep_blocks - decode.room, faults=self._faults(decode), charge_prefill=Charge(),
            charge_decode=self._decode_charge._replace(
                prefill_tokens=option.compute_tokens, prefill_us=option.compute_us),
        )  # fmt: skip

    def uncached(self, decode: Instance) -> int:
        """Tokens of the request whose KV this instance lacks, the last one not counted."""
        return self._wanted.num_tokens - 1 - self.held(decode)

    def has_room(self, decode: Instance) -> bool:
        """Whether the blocks it needs at once would be granted, the watermark kept."""
        spare = int(decode.hello.num_blocks * self._config.room_watermark) + 1 if decode.rows else 0
        return not decode.full and decode.room >= self._wanted.need_blocks + spare

    def takes_work(self, one: Instance) -> bool:
        """Whether its prefill queue is short enough to be given more."""
        return not one.prefill_tokens or self.queue_s(one) <= self._config.prefill_backlog_s

    def queue_s(self, one: Instance) -> float:
        """Predicted seconds until prefill work charged now would start."""
        return one.queue_s() if self._now is None else one.backlog_s(self._now)

    def transfer_s(self, prefill: Instance, decode: Instance) -> float:
        """Seconds on the link for the KV that decode lacks."""
        token_bytes = self._token_bytes.get(prefill.taste)
        if token_bytes is None:
            token_bytes = self._token_bytes[prefill.taste] = kv_token_bytes(prefill, self._group.layout)
        moving = self._wanted.num_tokens - 1 - self.held(decode)
        return moving * token_bytes / self._link(prefill, decode)

    def exposed_s(self, prefill: Instance, transfer_s: float, prefill_s: float) -> float:
        """The part of a transfer that does not hide behind computing: the last layer at least."""
        last_layer = transfer_s / num_layers(prefill, self._group.layout)
        return last_layer + max(0.0, transfer_s - last_layer - prefill_s)

    def _few(self, rows: list[Any]) -> list[Any]:
        """The first few of (score, picked, id, -tokens held, ...), and those that hold most of the others."""
        count = self._config.num_considered
        rows.sort()
        best = rows[:count]
        if len(rows) > count and self._held:
            best += sorted([row for row in rows[count:] if row[3] < 0], key=_most_held)[:count]
        return best

    def _best_decodes(self, instances: Sequence[Instance]) -> list[Instance]:
        keep = self._wanted.keep_blocks
        rows = [
            (one.step_hint_s() + (1e6 if one.room < keep else 0.0), one.picked, one.id, -self.held(one), one)
            for one in self.open_decodes(instances)
        ]
        return [row[-1] for row in self._few(rows)]

    def _found_sources(self) -> list[tuple[Instance, Match]]:
        """The pools that hold most of it, those with the least of that on SSD first."""
        if not self.fetches or not self._group.pools:
            return []
        if self._sources is not None:
            return self._sources
        held = [(pool, self._matches[name]) for name, pool in self._group.pools.items() if name in self._matches]
        self._sources = nsmallest(
            MAX_SOURCES, held,
            key=lambda one: (-min(one[1].blocks, self._max_match), one[1].ssd, one[0].fetch_scale, one[0].id),
        )  # fmt: skip
        return self._sources

    def option(self, one: Instance, *, alone: bool = False) -> PrefillOption:
        """Compute what is missing, fetch it, or fetch the front while the rest is computed: whatever is done first.
        alone: it decodes the request as well, and so computes the last token, too."""
        tokens, cached = self._wanted.num_tokens - (not alone), self.held(one)
        return self._option(one, tokens, self.queue_s(one), self.compute_s(one, tokens - cached, cached), alone)

    def _option(
        self, one: Instance, tokens: int, queue_s: float, compute_s: float, alone: bool = False
    ) -> PrefillOption:
        """queue_s, compute_s: what is known of it without a pool."""
        cached, best_s, best = self.held(one), compute_s, None
        size, layout = self._block_size, self._group.layout
        overlap: Overlap | None = None
        for pool, match in self._found_sources() if one.hello.shares_kv else ():
            most = min(match.blocks, self._max_match)
            if most * size <= cached:
                continue
            overlap = overlap or Overlap(
                partial(self.compute_s, one), tokens, size, one.hello.token_budget, num_layers(one, layout),
                self._config.fetch_latency_s, queue_s, beside=not (alone and one.rows),
            )  # fmt: skip
            path = Path(
                self._config, pool, match, cached // size, size, kv_token_bytes(one, layout), self._link(pool, one)
            )
            total_s, fetch = best_fetch(path, overlap, most)
            if total_s < best_s:
                best_s, best = total_s, fetch
        if best is not None:
            cached = best.blocks * size
            compute_s = self.compute_s(one, tokens - cached, cached)  # waiting for KV keeps nobody from computing
        return PrefillOption(one, best, cached, queue_s, best_s, tokens - cached, compute_s)

    def compute_s(self, one: Instance, num_new: int, num_cached: int) -> float:
        """Predicted prefill on this instance; instances of equal profile share the figure."""
        if num_new <= 0:
            return 0.0
        name = (one.taste, num_new, num_cached)
        declared = self._memo.get(name)
        if declared is None:
            declared = self._memo[name] = one.profile.prefill_s(num_new, num_cached)
        return declared * one.speed

    def step_s(self, decode: Instance) -> float:
        """Predicted decode step with this request in it."""
        step_s = self._steps.get(decode.id)
        if step_s is None:
            step_s = self._steps[decode.id] = decode.step_s(self._wanted.num_tokens)
        return step_s

    def _pace(self, decode: Instance, step_s: float, own_s: float) -> float:
        """Predicted TPOT: a decode step, and prefill work on the same instance spread over the usual output."""
        return step_s + (self.queue_s(decode) + own_s) / max(1.0, self._wanted.usual_output)

    def held(self, one: Instance) -> int:
        return self._held.get(one.id, 0)

    def _link(self, one: Instance, other: Instance) -> float:
        efficiency = one.latency.link_efficiency if one.latency else 0.8
        link = min(one.hello.hardware.link_bytes_per_s, other.hello.hardware.link_bytes_per_s) * efficiency
        same_host = one.hello.host_id == other.hello.host_id
        return max(link, self._config.same_host_bytes_per_s) if same_host else link

    def _faults(self, *instances: Instance) -> int:
        avoid = self._wanted.avoid
        return sum([avoid.get(one.id, 0) for one in instances]) if avoid else 0


def kv_token_bytes(one: Instance, layout: KvLayout) -> float:
    """Bytes of KV that a token is on this instance's link. The layout of an emulated engine is a small stand-in for the
    model it declares."""
    declared = one.latency.shape.kv_token_bytes if one.latency is not None else 0.0
    return max(float(layout.token_bytes), declared)


def num_layers(one: Instance, layout: KvLayout) -> int:
    """Layers that its KV comes in; of the declared model, as in kv_token_bytes."""
    return max(layout.num_layers, one.latency.shape.num_layers if one.latency is not None else 0)


def _most_held(row: tuple[Any, ...]) -> int:
    held: int = row[3]
    return held
