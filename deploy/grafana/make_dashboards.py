"""Draws the dashboards in deploy/grafana/dashboards: `python deploy/grafana/make_dashboards.py`.

Panels are rows of the tables below; a test keeps the JSON files equal to what this draws. Words: docs/metrics.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).parent / "dashboards"
SOURCE = {"type": "prometheus", "uid": "phaseplane"}
WIDTH = 24
FLEET = 'fleet=~"$fleet"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: its queries (legend -> PromQL; FLEET and WINDOW are filled in), unit and place in a row of 24."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    width: int = 8
    kind: str = "timeseries"
    stacked: bool = False
    says: str = ""


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    title: str
    rows: tuple[tuple[int, tuple[Panel, ...]], ...]
    """Height and panels of each."""


def percentiles(name: str, by: str = "class") -> dict[str, str]:
    """p50, p90 and p99 of a histogram."""
    return {
        f"p{share:g} {{{{{by}}}}}": f"histogram_quantile({share / 100:g}, sum by (fleet, {by}, le) "
        f"(rate({name}_bucket{{FLEET}}[WINDOW])))"
        for share in (50, 90, 99)
    }


GOODPUT = Dashboard(
    "goodput", "Phaseplane: goodput",
    (
        (4, (
            Panel("Attainment, 5 min", {"{{class}}, {{model}}": "phaseplane:attainment:5m{FLEET}"}, "percentunit", 6,
                "stat", says="Share of the requests that met every objective of their class."),
            Panel("Goodput", {"{{fleet}}": "phaseplane_goodput_requests_per_second{FLEET}"}, "reqps", 4, "stat",
                says="Good requests per second over 60 s."),
            Panel("Goodput per GPU", {"{{fleet}}": "phaseplane_goodput_requests_per_second_per_gpu{FLEET}"}, "reqps",
                4, "stat"),
            Panel("Cost per good request", {"{{fleet}}": "phaseplane_cost_per_good_request_dollars{FLEET}"},
                "currencyUSD", 4, "stat"),
            Panel("XPYD", {"{{role}}": "sum by (role) (phaseplane_instances{FLEET})"}, "short", 6, "stat",
                says="Instances by role."),
        )),
        (8, (
            Panel("Goodput and throughput", {
                "good": "phaseplane_goodput_requests_per_second{FLEET}",
                "completed": "phaseplane_throughput_requests_per_second{FLEET}",
                "arrived": "rate(phaseplane_arrivals_total{FLEET}[WINDOW])",
            }, "reqps", 12),
            Panel("Attainment by class and model", {
                "{{class}}, {{model}}": "phaseplane:attainment:5m{FLEET}",
                "since start": "phaseplane_slo_attainment{FLEET}",
            }, "percentunit", 12),
        )),
        (8, (
            Panel("TTFT", percentiles("phaseplane_ttft_seconds"), "s"),
            Panel("TPOT", percentiles("phaseplane_tpot_seconds"), "s"),
            Panel("ITL", percentiles("phaseplane_itl_seconds", "fleet"), "s"),
        )),
        (8, (
            Panel("Time to first token by stage", {
                "{{stage}}": "sum by (stage) (rate(phaseplane_stage_seconds_total{FLEET}[WINDOW])) "
                "/ on () group_left () sum(rate(phaseplane_ttft_seconds_count{FLEET}[WINDOW]))",
            }, "s", stacked=True, says="Mean seconds a request spent in each stage; they add up to TTFT."),
            Panel("Requests by outcome", {
                "{{outcome}}": "sum by (outcome) (rate(phaseplane_requests_total{FLEET}[WINDOW]))",
            }, "reqps", stacked=True),
            Panel("In flight", {
                "in flight": "phaseplane_requests_in_flight{FLEET}",
                "without a place": "phaseplane_requests_waiting_for_a_place{FLEET}",
                "doomed": "phaseplane_requests_doomed{FLEET}",
            }),
        )),
        (8, (
            Panel("XPYD over time", {
                "{{role}} {{state}}": "sum by (role, state) (phaseplane_instances{FLEET})",
            }, stacked=True),
            Panel("Cost per good request", {"{{fleet}}": "phaseplane_cost_per_good_request_dollars{FLEET}"},
                "currencyUSD"),
            Panel("Output tokens", {
                "of good requests": "phaseplane_good_tokens_per_second{FLEET}",
                "all": "sum by (fleet) (rate(vllm:generation_tokens_total{FLEET}[WINDOW]))",
            }, "short"),
        )),
    ),
)  # fmt: skip

INSTANCES = Dashboard(
    "instances", "Phaseplane: instances and KV",
    (
        (8, (
            Panel("Running", {"{{engine}}": "vllm:num_requests_running{FLEET}"}),
            Panel("Prompt tokens that wait", {"{{instance}} {{role}}": "phaseplane_queued_prefill_tokens{FLEET}"}),
            Panel("Engine step", {"{{instance}} {{role}}": "phaseplane_step_seconds{FLEET}"}, "s"),
        )),
        (8, (
            Panel("KV in use", {"{{instance}} {{role}}": "phaseplane:kv_use{FLEET}"}, "percentunit"),
            Panel("KV blocks with reusable KV", {"{{instance}} {{role}}": "phaseplane_kv_blocks_cached{FLEET}"}),
            Panel("KV blocks on SSD", {
                "{{instance}}": 'phaseplane_kv_blocks_ssd{role="kv_pool",FLEET}',
            }),
        )),
        (8, (
            Panel("Prompt tokens found, by tier", {
                "{{tier}}": "sum by (tier) (rate(phaseplane_prefix_hit_tokens_total{FLEET}[WINDOW])) "
                "/ on () group_left () sum(rate(phaseplane_prefix_lookup_tokens_total{FLEET}[WINDOW]))",
            }, "percentunit", stacked=True, says="Share of the prompt tokens that were looked up."),
            Panel("Prompt tokens", {
                "computed": "rate(phaseplane_prefill_tokens_computed_total{FLEET}[WINDOW])",
                "fetched": "rate(phaseplane_prefill_tokens_fetched_total{FLEET}[WINDOW])",
                "fetched sooner than computed": "rate(phaseplane_prefix_useful_tokens_total{FLEET}[WINDOW])",
            }),
            Panel("KV from prefill to decode", {
                "{{fleet}}": "rate(phaseplane_handoff_bytes_total{FLEET}[WINDOW])",
            }, "Bps"),
        )),
        (8, (
            Panel("Lost and failed", {
                "instances lost": "increase(phaseplane_instances_lost_total{FLEET}[WINDOW])",
                "engines failed": "increase(phaseplane_engine_failures_total{FLEET}[WINDOW])",
                "resumed": "increase(phaseplane_resumes_total{FLEET}[WINDOW])",
                "orphaned KV blocks": "phaseplane_orphaned_kv_blocks{FLEET}",
            }),
            Panel("Moved and preempted", {
                "migrated": "increase(phaseplane_migrations_total{FLEET}[WINDOW])",
                "moved by the autopilot": "increase(phaseplane_autopilot_moves_total{FLEET}[WINDOW])",
                "preempted {{instance}}": "increase(phaseplane_preemptions_total{FLEET}[WINDOW])",
            }),
            Panel("Control plane", {
                "cores": "rate(phaseplane_process_cpu_seconds_total{FLEET}[WINDOW])",
            }),
        )),
    ),
)  # fmt: skip


def draw(dashboard: Dashboard) -> dict[str, Any]:
    """The JSON that Grafana reads."""
    panels: list[dict[str, Any]] = []
    y = 0
    for height, row in dashboard.rows:
        x = 0
        for panel in row:
            place = {"h": height, "w": panel.width, "x": x, "y": y}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
            x += panel.width
        y += height
    return {
        "uid": f"phaseplane-{dashboard.name}", "title": dashboard.title, "tags": ["phaseplane"], "timezone": "browser",
        "schemaVersion": 39, "refresh": "5s", "time": {"from": "now-15m", "to": "now"}, "editable": False,
        "templating": {"list": [_fleets()]}, "panels": panels,
    }  # fmt: skip


def _panel(panel: Panel) -> dict[str, Any]:
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.stacked else {"fillOpacity": 5}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    if panel.unit == "percentunit":
        defaults["max"] = 1
    targets = [
        {"refId": chr(ord("A") + number), "datasource": SOURCE, "legendFormat": legend, "expr": _filled(query)}
        for number, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": panel.kind, "title": panel.title, "description": panel.says, "datasource": SOURCE, "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }  # fmt: skip


def _filled(query: str) -> str:
    return query.replace("FLEET", FLEET).replace("WINDOW", "$__rate_interval")


def _fleets() -> dict[str, Any]:
    return {
        "name": "fleet", "type": "query", "datasource": SOURCE, "refresh": 2, "includeAll": False,
        "query": {"query": "label_values(phaseplane_uptime_seconds, fleet)", "refId": "fleet"},
    }  # fmt: skip


def text_of(dashboard: Dashboard) -> str:
    return json.dumps(draw(dashboard), indent=1) + "\n"


if __name__ == "__main__":
    for one in (GOODPUT, INSTANCES):
        (DASHBOARDS / f"{one.name}.json").write_text(text_of(one), encoding="utf-8")
