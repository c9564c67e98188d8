"""Predicts, for one request, what each way of serving it would cost: queue, compute, transfer, pace, KV room.

Pure arithmetic over LatencyProfile, charged load and the directory. Chooses nothing (placement.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest

from controlplane.core.config import CoreConfig
from controlplane.core.directory import Match
from controlplane.core.fetching import Fetch, Overlap, Path, best_fetch
from controlplane.core.fleet import Group
from controlplane.core.instance import US, Charge, Instance
from controlplane.core.placement import Candidate, Wanted
from transfer.terms import InstanceId

MAX_SOURCES = 2
"""Pools that are weighed as the source of one request's KV."""

Matches = Mapping[InstanceId, Match]
"""Leading whole blocks that an instance holds of the request, by instance."""


@dataclass(slots=True)
class PrefillOption:
    """prefill_s: computing, and fetching where there is a fetch. cached_tokens: those fetched included."""

    instance: Instance
    fetch: Fetch | None
    cached_tokens: int
    queue_s: float
    prefill_s: float
    compute_tokens: int
    compute_us: int

    @property
    def done_s(self) -> float:
        return self.queue_s + self.prefill_s


class Estimator:
    """Weighs one request against one model's group. Made for each decision, so that repeated figures are shared."""

    def __init__(self, config: CoreConfig, group: Group, wanted: Wanted, matches: Matches) -> None:
        self._config, self._group, self._wanted, self._matches = config, group, wanted, matches
        self._memo: dict[tuple[int, int, int], float] = {}
        self._steps: dict[InstanceId, float] = {}
        self._block_size = group.layout.block_size
        self._max_match = max(0, wanted.num_tokens - 1) // self._block_size
        self._sources = self._best_sources()

    def prefills(self) -> list[PrefillOption]:
        """The best few prefill instances that take work now, each with its best KV source."""
        wanted, count = self._wanted, self._config.num_considered
        tokens = wanted.num_tokens - 1
        usable = [one for one in self._group.prefills if self.takes_work(one) and one.id not in wanted.unfit]
        best = nsmallest(
            count, usable,
            key=lambda one: (one.queue_s() + self._compute_s(one, tokens, 0), one.picked, one.id),
        )  # fmt: skip
        holding = [one for one in usable if one.id in self._matches and one not in best]
        holding = nsmallest(count, holding, key=lambda one: (-self._held(one), one.queue_s(), one.picked, one.id))
        return [self._prefill_option(one) for one in best + holding]

    def decodes(self) -> list[Instance]:
        """The best few decode instances with room."""
        return self._best_decodes(self._group.decodes)

    def mixed(self) -> list[Instance]:
        """The best few mixed instances with room that take work now."""
        return self._best_decodes([one for one in self._group.mixed if self.takes_work(one)])

    def pair(self, option: PrefillOption, decode: Instance) -> Candidate:
        """Prefill here, decode there."""
        wanted, layout, prefill = self._wanted, self._group.layout, option.instance
        tokens = wanted.num_tokens - 1
        moving = tokens - self._held(decode)
        num_bytes = moving * layout.token_bytes
        transfer_s = num_bytes / self._link(prefill, decode)
        last_layer = transfer_s / layout.num_layers
        exposed_s = last_layer + max(0.0, transfer_s - last_layer - option.prefill_s)
        step_s = self._step_s(decode)
        return Candidate(
            decode=decode, prefill=prefill, fetch=option.fetch, compute_tokens=option.compute_tokens,
            cached_tokens=option.cached_tokens, queue_s=option.queue_s, prefill_s=option.prefill_s,
            transfer_s=transfer_s, ttft_s=option.done_s + exposed_s + step_s, tpot_s=self._pace(decode, step_s, 0.0),
            short_blocks=wanted.keep_blocks - decode.room, faults=self._faults(prefill, decode),
            charge_prefill=Charge(prefill_tokens=option.compute_tokens, prefill_us=option.compute_us),
            charge_decode=self._decode_charge(),
        )  # fmt: skip

    def local(self, decode: Instance) -> Candidate:
        """One instance computes the prompt and decodes."""
        wanted = self._wanted
        cached = self._held(decode)
        tokens = wanted.num_tokens - cached
        queue_s, compute_s = decode.queue_s(), self._compute_s(decode, tokens, cached)
        work = Charge(prefill_tokens=tokens, prefill_us=round(compute_s / decode.speed * US))
        step_s = self._step_s(decode)
        return Candidate(
            decode=decode, prefill=None, fetch=None, compute_tokens=tokens, cached_tokens=cached, queue_s=queue_s,
            prefill_s=compute_s, transfer_s=0.0, ttft_s=queue_s + compute_s + (step_s if decode.rows else 0.0),
            tpot_s=self._pace(decode, step_s, compute_s), short_blocks=wanted.keep_blocks - decode.room,
            faults=self._faults(decode), charge_prefill=Charge(),
            charge_decode=self._decode_charge()._replace(
                prefill_tokens=work.prefill_tokens, prefill_us=work.prefill_us),
        )  # fmt: skip

    def uncached(self, decode: Instance) -> int:
        """Tokens of the request whose KV this instance lacks, the last one not counted."""
        return self._wanted.num_tokens - 1 - self._held(decode)

    def has_room(self, decode: Instance) -> bool:
        """Whether the blocks it needs at once would be granted, the watermark kept."""
        spare = int(decode.hello.num_blocks * self._config.room_watermark) + 1 if decode.rows else 0
        return not decode.full and decode.room >= self._wanted.need_blocks + spare

    def takes_work(self, one: Instance) -> bool:
        """Whether its prefill queue is short enough to be given more."""
        return not one.prefill_tokens or one.queue_s() <= self._config.prefill_backlog_s

    def _best_decodes(self, instances: list[Instance]) -> list[Instance]:
        wanted, count = self._wanted, self._config.num_considered
        usable = [one for one in instances if one.id not in wanted.unfit and self.has_room(one)]
        key: Callable[[Instance], tuple[bool, float, int, str]] = lambda one: (  # noqa: E731
            one.room < wanted.keep_blocks, one.step_hint_s(), one.picked, one.id,
        )  # fmt: skip
        best = nsmallest(count, usable, key=key)
        holding = [one for one in usable if one.id in self._matches and one not in best]
        return best + nsmallest(count, holding, key=lambda one: (-self._held(one), one.picked, one.id))

    def _best_sources(self) -> list[tuple[Instance, Match]]:
        """The pools that hold most of it, those with the least of that on SSD first."""
        held = [(pool, self._matches[name]) for name, pool in self._group.pools.items() if name in self._matches]
        return nsmallest(
            MAX_SOURCES, held,
            key=lambda one: (-min(one[1].blocks, self._max_match), one[1].ssd, one[0].fetch_scale, one[0].id),
        )  # fmt: skip

    def _prefill_option(self, one: Instance) -> PrefillOption:
        """Compute what is missing, fetch it, or fetch the front while the rest is computed: whatever is done first."""
        tokens, size, layout = self._wanted.num_tokens - 1, self._block_size, self._group.layout
        cached = self._held(one)
        best_s, best = self._compute_s(one, tokens - cached, cached), None
        overlap: Overlap | None = None
        for pool, match in self._sources:
            most = min(match.blocks, self._max_match)
            if most * size <= cached:
                continue
            overlap = overlap or Overlap(
                partial(self._compute_s, one), tokens, size, one.hello.token_budget, layout.num_layers,
                self._config.fetch_latency_s, one.queue_s(),
            )  # fmt: skip
            path = Path(self._config, pool, match, cached // size, layout, self._link(pool, one))
            total_s, fetch = best_fetch(path, overlap, most)
            if total_s < best_s:
                best_s, best = total_s, fetch
        held = cached if best is None else best.blocks * size
        compute_s = self._compute_s(one, tokens - held, held)  # waiting for KV keeps nobody else from computing
        return PrefillOption(
            instance=one, fetch=best, cached_tokens=held, queue_s=one.queue_s(), prefill_s=best_s,
            compute_tokens=tokens - held, compute_us=round(compute_s / one.speed * US),
        )  # fmt: skip

    def _compute_s(self, one: Instance, num_new: int, num_cached: int) -> float:
        """Predicted prefill on this instance; instances of equal profile share the figure."""
        if num_new <= 0:
            return 0.0
        name = (one.taste, num_new, num_cached)
        declared = self._memo.get(name)
        if declared is None:
            declared = self._memo[name] = one.profile.prefill_s(num_new, num_cached)
        return declared * one.speed

    def _step_s(self, decode: Instance) -> float:
        """Predicted decode step with this request in it."""
        step_s = self._steps.get(decode.id)
        if step_s is None:
            step_s = self._steps[decode.id] = decode.step_s(self._wanted.num_tokens)
        return step_s

    def _pace(self, decode: Instance, step_s: float, own_s: float) -> float:
        """Predicted TPOT: a decode step, and prefill work on the same instance spread over the usual output."""
        return step_s + (decode.queue_s() + own_s) / max(1.0, self._wanted.usual_output)

    def _held(self, one: Instance) -> int:
        match = self._matches.get(one.id)
        return min(match.lead, self._max_match) * self._block_size if match is not None else 0

    def _link(self, one: Instance, other: Instance) -> float:
        efficiency = one.latency.link_efficiency if one.latency else 0.8
        link = min(one.hello.hardware.link_bytes_per_s, other.hello.hardware.link_bytes_per_s) * efficiency
        same_host = one.hello.host_id == other.hello.host_id
        return max(link, self._config.same_host_bytes_per_s) if same_host else link

    def _faults(self, *instances: Instance) -> int:
        return sum(self._wanted.avoid.get(one.id, 0) for one in instances)

    def _decode_charge(self) -> Charge:
        wanted = self._wanted
        context = wanted.num_tokens + int(wanted.usual_output) // 2
        return Charge(rows=1, context_tokens=context, blocks=wanted.keep_blocks)
