"""What is known about this second, by series name: goodput, queues, latencies, cache hits, classes, instances.

Reads the books and changes nothing in them; docs/feed.md lists the names. Values that do not exist are left out.
"""

from __future__ import annotations

from collections import deque

from controlplane.core.desk import Desk
from controlplane.core.goodput import SHORT_WINDOW_S, WINDOW_S, Counts
from controlplane.core.hits import kv_view
from controlplane.core.instance import Instance, InstanceState
from controlplane.core.stages import STAGES
from transfer.terms import Role

HIT_TIERS = (("device", "device_tokens"), ("pool_dram", "pool_dram_tokens"), ("pool_ssd", "pool_ssd_tokens"))


class Readings:
    """`take` once a second. Keeps the counters of the last minute, for rates; nothing else."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._past: deque[tuple[float, int, tuple[int, ...]]] = deque(maxlen=WINDOW_S + 1)
        """(now, arrivals, looked up tokens and hits by tier), one a second."""

    def take(self, now: float) -> dict[str, float]:
        """Everything that has a value at loop time `now`."""
        desk = self._desk
        desk.goodput.advance(now)
        found: dict[str, float | None] = {
            "in_flight": len(desk.requests), "queue_depth": len(desk.line),
            "orphaned_kv_blocks": desk.ledger.orphaned_blocks(now),
        }  # fmt: skip
        found |= self._goodput(now) | self._rates(now) | self._fleet() | self._classes(now) | self._models(now)
        for one in desk.fleet.ordered():
            if one.state is not InstanceState.LOST:
                found |= _instance(one, desk.goodput.paces.median(one.id))
        return {name: value for name, value in found.items() if value is not None}

    def _goodput(self, now: float) -> dict[str, float | None]:
        goodput = self._desk.goodput
        long, short = goodput.goodput(WINDOW_S, now), goodput.goodput(SHORT_WINDOW_S, now)
        counts = goodput.windows[WINDOW_S].everything()
        stages = goodput.missed_stages(now)
        return {
            "goodput_per_s": long.per_s, "goodput_10s_per_s": short.per_s, "goodput_per_gpu": long.per_gpu,
            "throughput_per_s": long.throughput_per_s, "tokens_per_s": long.tokens_per_s,
            "cost_per_good": long.cost_per_good, **_quality(counts, ""),
            **{f"stage.{stage}_s": stages.get(stage, 0.0) for stage in STAGES},
        }  # fmt: skip

    def _rates(self, now: float) -> dict[str, float | None]:
        """Arrivals a second over 10 s, and of the prompt tokens looked up in the last minute the share found."""
        arrived, kv = self._desk.counters.get("arrived", 0), kv_view(self._desk)
        tokens = (kv.looked_up_tokens, *(getattr(kv, field) for _, field in HIT_TIERS))
        self._past.append((now, arrived, tokens))
        recent = next(one for one in self._past if one[0] >= now - SHORT_WINDOW_S)
        span_s = now - recent[0]
        looked_up, *hits = (new - old for new, old in zip(tokens, self._past[0][2], strict=True))
        found: dict[str, float | None] = {"offered_per_s": (arrived - recent[1]) / span_s if span_s > 0 else None}
        for (tier, _), hit in zip(HIT_TIERS, hits, strict=True):
            found[f"hit_{tier}"] = hit / looked_up if looked_up else None
        return found

    def _fleet(self) -> dict[str, float | None]:
        fleet = self._desk.fleet
        counts, alive = fleet.counts(), fleet.alive()
        return {
            "num_prefill": counts[Role.PREFILL], "num_decode": counts[Role.DECODE], "num_mixed": counts[Role.MIXED],
            "queued_prefill_tokens": sum(one.load.queued_prefill_tokens for one in alive),
            "kv_use": _use([one for one in alive if one.role is not Role.KV_POOL]),
            "pool_use": _use([one for one in alive if one.role is Role.KV_POOL]),
        }  # fmt: skip

    def _classes(self, now: float) -> dict[str, float | None]:
        desk = self._desk
        doomed: dict[str, int] = dict.fromkeys(desk.config.classes, 0)
        for request in desk.requests.values():
            doomed[request.traffic_class] += request.doomed(now)
        window, span_s = desk.goodput.windows[WINDOW_S], desk.goodput.span_s(WINDOW_S, now)
        found: dict[str, float | None] = {}
        for name in desk.config.classes:
            counts, lead = window.by_class.get(name) or Counts(), f"class.{name}."
            found |= {
                f"{lead}goodput_per_s": counts.good / desk.goodput.span_s(WINDOW_S, now, name),
                f"{lead}throughput_per_s": counts.finished / span_s, f"{lead}doomed": doomed[name],
                **_quality(counts, lead),
            }  # fmt: skip
        return found

    def _models(self, now: float) -> dict[str, float | None]:
        goodput, found = self._desk.goodput, dict[str, float | None]()
        for name in goodput.models(self._desk.fleet.groups):
            _, counts, per_s = goodput.of_model(name, now)
            lead, throughput = f"model.{name}.", counts.finished / goodput.span_s(WINDOW_S, now)
            found |= {
                f"{lead}goodput_per_s": per_s, f"{lead}throughput_per_s": throughput, **_quality(counts, lead),
            }  # fmt: skip
        return found


def _quality(counts: Counts, lead: str) -> dict[str, float | None]:
    """Attainment and percentiles of a window."""
    return {
        f"{lead}attainment": counts.good / counts.total if counts.total else None,
        f"{lead}ttft_p50_s": counts.ttft_s.quantile(0.5), f"{lead}ttft_p90_s": counts.ttft_s.quantile(0.9),
        f"{lead}tpot_p50_s": counts.tpot_s.quantile(0.5), f"{lead}tpot_p90_s": counts.tpot_s.quantile(0.9),
    }  # fmt: skip


def _instance(one: Instance, tpot_p50_s: float | None) -> dict[str, float | None]:
    load, lead = one.load, f"instance.{one.id}."
    return {
        f"{lead}num_running": load.num_running, f"{lead}num_waiting": load.num_waiting,
        f"{lead}kv_use": one.kv_use, f"{lead}step_s": load.step_s, f"{lead}speed": one.speed,
        f"{lead}tpot_p50_s": tpot_p50_s,
    }  # fmt: skip


def _use(instances: list[Instance]) -> float | None:
    """Share of their blocks that is in use; None without any."""
    num_blocks = sum(one.load.num_blocks for one in instances)
    free = sum(one.load.free_blocks for one in instances)
    return (num_blocks - free) / num_blocks if num_blocks else None
