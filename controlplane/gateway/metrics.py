"""What /metrics shows: our names and the vLLM names that operators' dashboards read already.

Request counters are fed with finished records, gauges come from the fleet's state at the time of the scrape.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controlplane.gateway.metric_help import help_of
from controlplane.gateway.prometheus import Histogram, Labels, Text
from transfer.api import FleetState, InstanceView, RequestRecord
from transfer.terms import Slo

ENGINE = "fleet"
"""The `engine` label of what is measured at the gateway; per-instance gauges carry the instance id."""

_TTFT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_E2E = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


@dataclass
class _Latencies:
    """Histograms of one traffic class and model."""

    ttft: Histogram
    tpot: Histogram
    e2e: Histogram


class GatewayMetrics:
    """Counts since start. Every objective of a class is a boundary of its histograms, so that a query is exact."""

    def __init__(self, model_name: str, classes: Mapping[str, Slo | None], models: Iterable[str]) -> None:
        """model_name: what vLLM's names carry. models: those that are served, as records name them."""
        slos = [slo for slo in classes.values() if slo is not None]
        self._ttft_bounds = (*_TTFT, *(slo.ttft_s for slo in slos))
        self._token_bounds = (*_TOKEN, *(slo.tpot_s for slo in slos))
        self._e2e_bounds = (*_E2E, *(slo.e2e_s for slo in slos if slo.e2e_s is not None))
        self._model, self._classes = model_name, tuple(classes)
        self._all = self._latencies()
        self._by_labels: dict[tuple[str, str], _Latencies] = {
            (name, model): self._latencies() for name in classes for model in models
        }
        """By class and model."""
        self._itl = Histogram(self._token_bounds)
        self._stages: defaultdict[str, float] = defaultdict(float)
        self._outcomes: Counter[tuple[str, str, str]] = Counter()
        self._good: Counter[tuple[str, str]] = Counter()
        self._finish: Counter[str] = Counter()
        self._prompt_tokens = self._output_tokens = self._cached_tokens = 0
        self._resumes = self._migrations = self._replaced = 0

    @property
    def classes(self) -> tuple[str, ...]:
        """The configured traffic classes."""
        return self._classes

    def gap(self, seconds: float) -> None:
        """One inter-token latency; on the token path."""
        self._itl.observe(seconds)

    def finished(self, record: RequestRecord) -> None:
        """Count one request, once."""
        labels = (record.traffic_class, record.model)
        self._outcomes[*labels, record.outcome] += 1
        self._resumes += record.num_resumes
        self._migrations += record.num_migrations
        self._replaced += record.num_replaced
        for stage, seconds in record.stages_s.items():
            self._stages[stage] += seconds
        if record.good:
            self._good[labels] += 1
        self._finish[_VLLM_REASONS.get(record.outcome) or record.finish_reason or "stop"] += 1
        self._output_tokens += record.output_tokens
        if record.ttft_s is not None:
            self._prompt_tokens += record.prompt_tokens
            self._cached_tokens += record.cached_tokens
        own = self._by_labels.get(labels)
        if own is None:
            own = self._by_labels[labels] = self._latencies()
        for latencies in (self._all, own):
            if record.ttft_s is not None:
                latencies.ttft.observe(record.ttft_s)
            if record.tpot_s is not None:
                latencies.tpot.observe(record.tpot_s)
            if record.outcome == "ok":
                latencies.e2e.observe(record.e2e_s)

    def render(self, fleet: FleetState, core: Mapping[str, float], process: Mapping[str, float]) -> bytes:
        """One scrape. core, process: further gauges or counters by name without prefix (counters end in _total)."""
        text = Text(help_of)
        self._ours(text)
        _fleet(text, fleet)
        for name, value in {**core, **process}.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            text.family(f"phaseplane_{name}", kind, [({}, value)])
        self._vllm(text, fleet)
        return text.encode()

    def _latencies(self) -> _Latencies:
        return _Latencies(Histogram(self._ttft_bounds), Histogram(self._token_bounds), Histogram(self._e2e_bounds))

    def _ours(self, text: Text) -> None:
        outcomes = [
            ({"class": name, "model": model, "outcome": what}, count)
            for (name, model, what), count in self._outcomes.items()
        ]
        text.family("phaseplane_requests_total", "counter", outcomes)
        good = [({"class": name, "model": model}, self._good[name, model]) for name, model in self._by_labels]
        text.family("phaseplane_good_requests_total", "counter", good)
        for name in ("ttft", "tpot", "e2e"):
            pairs = [
                ({"class": traffic_class, "model": model}, getattr(one, name))
                for (traffic_class, model), one in self._by_labels.items()
            ]
            text.histograms(f"phaseplane_{name}_seconds", pairs)
        text.histograms("phaseplane_itl_seconds", [({}, self._itl)])
        stages = [({"stage": stage}, seconds) for stage, seconds in self._stages.items()]
        text.family("phaseplane_stage_seconds_total", "counter", stages)
        text.family("phaseplane_resumes_total", "counter", [({}, self._resumes)])
        text.family("phaseplane_migrations_total", "counter", [({}, self._migrations)])
        text.family("phaseplane_replaced_total", "counter", [({}, self._replaced)])

    def _vllm(self, text: Text, fleet: FleetState) -> None:
        here = {"engine": ENGINE, "model_name": self._model}
        serving = [view for view in fleet.instances if view.role != "kv_pool"]

        def gauges(pick: str) -> Iterable[tuple[Labels, float]]:
            return [({"engine": view.id, "model_name": self._model}, getattr(view, pick)) for view in serving]

        text.family("vllm:num_requests_running", "gauge", gauges("num_running"))
        text.family("vllm:num_requests_waiting", "gauge", gauges("num_waiting"))
        text.family("vllm:kv_cache_usage_perc", "gauge", gauges("kv_use"))
        for name, value in (
            ("prefix_cache_queries", self._prompt_tokens),
            ("prefix_cache_hits", self._cached_tokens),
            ("prompt_tokens", self._prompt_tokens),
            ("generation_tokens", self._output_tokens),
        ):
            text.family(f"vllm:{name}_total", "counter", [(here, value)])
        reasons = [({**here, "finished_reason": reason}, count) for reason, count in self._finish.items()]
        text.family("vllm:request_success_total", "counter", reasons)
        for name, histogram in (
            ("time_to_first_token_seconds", self._all.ttft),
            ("inter_token_latency_seconds", self._itl),
            ("request_time_per_output_token_seconds", self._all.tpot),
            ("e2e_request_latency_seconds", self._all.e2e),
        ):
            text.histograms(f"vllm:{name}", [(here, histogram)])


_VLLM_REASONS = {"cancelled": "abort", "rejected": "error", "timed_out": "error", "error": "error"}


def _fleet(text: Text, fleet: FleetState) -> None:
    goodput = fleet.goodput
    for name, value in (
        ("orphaned_kv_blocks", fleet.orphaned_kv_blocks),
        ("requests_in_flight", fleet.in_flight),
        ("goodput_requests_per_second", goodput.per_s),
        ("goodput_requests_per_second_per_gpu", goodput.per_gpu),
        ("good_tokens_per_second", goodput.tokens_per_s),
        ("throughput_requests_per_second", goodput.throughput_per_s),
        ("slo_attainment", fleet.attainment),
        ("cost_per_good_request_dollars", goodput.cost_per_good),
        ("fleet_version", fleet.version),
        ("uptime_seconds", fleet.uptime_s),
    ):
        if value is not None:
            text.family(f"phaseplane_{name}", "gauge", [({}, value)])
    kv = fleet.kv
    text.family(
        "phaseplane_prefix_hit_tokens_total", "counter",
        [({"tier": "device"}, kv.device_tokens), ({"tier": "pool_dram"}, kv.pool_dram_tokens),
         ({"tier": "pool_ssd"}, kv.pool_ssd_tokens)],
    )  # fmt: skip
    for name, count in (
        ("prefix_lookup_tokens", kv.looked_up_tokens),
        ("prefix_useful_tokens", kv.useful_tokens),
        ("prefix_replicated_blocks", kv.replicated_blocks),
    ):
        text.family(f"phaseplane_{name}_total", "counter", [({}, count)])
    counts = Counter((view.role, view.state) for view in fleet.instances)
    instances = [({"role": role, "state": state}, count) for (role, state), count in counts.items()]
    text.family("phaseplane_instances", "gauge", instances)
    for name, pick in (
        ("kv_blocks", "num_blocks"),
        ("kv_blocks_free", "free_blocks"),
        ("kv_blocks_cached", "cached_blocks"),
        ("kv_blocks_ssd", "ssd_blocks"),
        ("queued_prefill_tokens", "queued_prefill_tokens"),
        ("step_seconds", "step_s"),
    ):
        text.family(f"phaseplane_{name}", "gauge", [(_of(view), getattr(view, pick)) for view in fleet.instances])
    preemptions = [(_of(view), view.num_preemptions) for view in fleet.instances]
    text.family("phaseplane_preemptions_total", "counter", preemptions)


def _of(view: InstanceView) -> Labels:
    return {"instance": view.id, "role": view.role, "hardware": view.hardware}
