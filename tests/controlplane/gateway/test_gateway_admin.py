"""The operator's endpoints: fleet, live feed, plans, history, readiness, metrics."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest
from gateway_fakes import FakeCore, Front, a_plan, fleet_state, front, items

from controlplane.config import Config, Model, Server, TrafficClass
from controlplane.core.events import ApplyWanted
from controlplane.gateway.health import missing_role
from controlplane.gateway.live import MAX_FRAMES_KEPT, MAX_FRAMES_QUEUED, LiveFeed, difference
from controlplane.gateway.metrics import GatewayMetrics
from controlplane.gateway.prometheus import Histogram, number, sample
from transfer.api import AuditRow, FleetState, LiveFrame, Plan, RequestRecord
from transfer.terms import Slo
from ui.feed import fold

VLLM = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
)  # fmt: skip


async def get(f: Front, path: str) -> tuple[int, Any]:
    async with f.client.get(path) as response:
        return response.status, await response.json()


async def post(f: Front, path: str, body: Any) -> tuple[int, Any]:
    async with f.client.post(path, json=body) as response:
        return response.status, await response.json()


async def test_fleet_is_the_schema_of_the_api() -> None:
    async with front() as f, f.client.get("/v1/fleet") as response:
        assert msgspec.json.decode(await response.read(), type=FleetState) == f.core.fleet


@pytest.mark.parametrize(
    ("roles", "missing"),
    [
        ((), "no prefill and no decode"), (("prefill",), "no decode"), (("decode", "kv_pool"), "no prefill"),
        (("prefill", "decode"), None), (("mixed",), None),
    ],
)  # fmt: skip
async def test_ready_needs_a_pair_or_a_mixed_instance(roles: tuple[str, ...], missing: str | None) -> None:
    async with front() as f:
        f.core.fleet = fleet_state(*roles)
        status, body = await get(f, "/readyz")
        if missing is None:
            assert (status, body) == (200, {"status": "ready"})
        else:
            assert status == 503
            assert missing in body["error"]["message"]
        assert (await get(f, "/healthz"))[0] == 200


async def test_a_probe_asks_for_one_instance() -> None:
    async with front() as f:
        f.core.fleet = fleet_state("prefill")
        known = f.core.fleet.instances[0].id
        assert await get(f, f"/readyz?instance={known}") == (200, {"status": "ready"})
        status, body = await get(f, "/readyz?instance=other")
        assert status == 503
        assert "instance other is not here" in body["error"]["message"]
        f.core.fleet = fleet_state("prefill", state="draining")
        assert (await get(f, f"/readyz?instance={known}"))[0] == 503


def test_instances_that_drain_or_load_do_not_count_as_ready() -> None:
    assert missing_role(fleet_state("mixed", state="draining")) is not None


async def test_plans() -> None:
    async with front() as f:
        status, body = await post(f, "/v1/plans", {"xpyd": "1P2D"})
        assert (status, msgspec.convert(body, Plan)) == (200, a_plan())
        for wrong in ({}, {"xpyd": "1P2D", "moves": {}}, {"xpdy": "1P2D"}, {"xpyd": 3}):
            status, body = await post(f, "/v1/plans", wrong)
            assert status == 400, wrong
        assert (await get(f, "/v1/plans"))[1]["plans"][0]["plan_id"] == "plan-1"
        assert (await get(f, "/v1/plans/plan-1"))[0] == 200
        assert (await get(f, "/v1/plans/nope"))[0] == 404
        assert (await post(f, "/v1/plans/plan-1/apply", {"base_version": 1, "actor": "me"}))[0] == 200
        assert (await post(f, "/v1/plans/plan-1/undo", {"base_version": 1}))[0] == 200
        applies = [event for event in f.core.events if isinstance(event, ApplyWanted)]
        assert [(event.plan_id, event.undo, event.apply.actor) for event in applies] == [
            ("plan-1", False, "me"), ("plan-1", True, "operator"),
        ]  # fmt: skip
        assert all(event.at_s > 1e9 for event in applies)
        f.core.refusal = (409, "the fleet changed since")
        for wrong in ({"base_version": -1}, {"base_version": 10**30}, {"base_version": 1, "actor": "x" * 257}):
            for path in ("apply", "undo"):
                assert (await post(f, f"/v1/plans/plan-1/{path}", wrong))[0] == 400
        status, body = await post(f, "/v1/plans/plan-1/apply", {"base_version": 1})
        assert (status, body["error"]["message"], body["error"]["type"]) == (
            409, "the fleet changed since", "conflict_error",
        )  # fmt: skip


async def test_the_audit_names_the_tenant_whose_key_it_was() -> None:
    config = Config(model=Model(name="m", engine="emulated"), server=Server(api_keys={"alice": "sk-12345678"}))
    async with front(config) as f:
        headers = {"Authorization": "Bearer sk-12345678"}
        body = {"base_version": 1, "actor": "mallory"}
        assert (await f.client.post("/v1/plans/plan-1/apply", json=body, headers=headers)).status == 200
        assert (await f.client.post("/v1/plans/plan-1/apply", json=body)).status == 401
        (event,) = (event for event in f.core.events if isinstance(event, ApplyWanted))
        assert event.apply.actor == "alice"


async def test_requests_and_audit() -> None:
    async with front() as f:
        f.reply(lambda spec: items(spec.request_id, "a"))
        for _ in range(3):
            await post(f, "/v1/completions", {"model": "m", "prompt": "x"})
        status, body = await get(f, "/v1/requests?limit=2&outcome=ok")
        assert status == 200
        newest = f.archive.records[-1]
        assert msgspec.convert(body["requests"][0], RequestRecord) == newest
        assert len(body["requests"]) == 2
        assert (await get(f, f"/v1/requests/{newest.request_id}"))[1]["request_id"] == newest.request_id
        assert (await get(f, "/v1/requests/nope"))[0] == 404
        f.archive.rows.append(AuditRow(at_s=1.0, actor="a", action="apply", subject="plan-1"))
        assert (await get(f, "/v1/audit"))[1]["audit"][0]["subject"] == "plan-1"
        for wrong in ("limit=0", "limit=1001", "limit=x", "limit=0000000019999", "outcome=fine"):
            assert (await get(f, f"/v1/requests?{wrong}"))[0] == 400, wrong


async def read_event(response: Any) -> tuple[int, LiveFrame]:
    text = (await asyncio.wait_for(response.content.readuntil(b"\n\n"), 5)).decode()
    fields = dict(line.split(": ", 1) for line in text.strip().split("\n"))
    frame = msgspec.json.decode(fields["data"].encode(), type=LiveFrame)
    assert fields["event"] == frame.kind
    return int(fields["id"]), frame


async def test_live_is_a_snapshot_then_deltas_and_resumes() -> None:
    async with front() as f:
        async with f.client.get("/v1/live") as response:
            seq, frame = await read_event(response)
            assert (frame.kind, frame.state) == ("snapshot", f.core.fleet)
            f.core.fleet = fleet_state("prefill", "decode", "decode", version=2)
            f.gateway.live.tick()
            next_seq, delta = await read_event(response)
            assert (next_seq, delta.kind, delta.ids) == (seq + 1, "delta", ())
            assert delta.changed["version"] == 2
            assert fold(frame.state, delta) == f.core.fleet
        f.core.fleet = fleet_state("prefill", "decode", version=3)
        f.gateway.live.tick()
        async with f.client.get("/v1/live", headers={"Last-Event-ID": str(seq)}) as response:
            assert [(await read_event(response))[0] for _ in range(2)] == [seq + 1, seq + 2]
        for unknown in ("0", str(seq + 100), "x", str(seq - 1)):
            async with f.client.get("/v1/live", headers={"Last-Event-ID": unknown}) as response:
                last, frame = await read_event(response)
                assert (last, frame.kind, frame.state) == (seq + 2, "snapshot", f.core.fleet), unknown


async def test_a_slow_subscriber_gets_a_fresh_snapshot_and_the_ring_is_bounded() -> None:
    core = FakeCore()
    feed = LiveFeed(lambda: core.state(0.0))
    slow = feed.subscribe(None)
    first = await slow.get(feed.snapshot, 1)
    seq = int(first[0].split(b"\n")[0].removeprefix(b"id: "))
    for version in range(2, MAX_FRAMES_QUEUED + 3):
        core.fleet = fleet_state("mixed", version=version)
        feed.tick()
    (event,) = await slow.get(feed.snapshot, 1)
    assert b'"kind":"snapshot"' in event
    assert b'"version":%d' % (MAX_FRAMES_QUEUED + 2) in event
    assert await slow.get(feed.snapshot, 0.01) == []
    for version in range(1000, 1000 + MAX_FRAMES_KEPT):
        core.fleet = fleet_state("mixed", version=version)
        feed.tick()
    assert b"snapshot" in (await feed.subscribe(str(seq)).get(feed.snapshot, 1))[0]


async def test_an_unchanged_fleet_makes_no_frame_and_a_client_is_up_to_date() -> None:
    feed = LiveFeed(lambda: fleet_state("mixed"))
    (event,) = await feed.subscribe(None).get(feed.snapshot, 1)
    feed.tick()
    seen = event.split(b"\n")[0].removeprefix(b"id: ").decode()
    again = feed.subscribe(seen)
    assert await again.get(feed.snapshot, 0.01) == []


def test_a_delta_has_columns_of_what_changed_and_all_instances_when_one_comes_or_goes() -> None:
    old = fleet_state("prefill", "decode", "decode")
    one, two, three = old.instances
    busy = msgspec.structs.replace(two, num_running=3, kv_use=0.5)
    slow = msgspec.structs.replace(three, num_running=3)
    new = msgspec.structs.replace(old, instances=(one, busy, slow), in_flight=6)
    columns = {"num_running": (3, 3), "kv_use": (0.5, 0.0)}
    assert difference(old, new) == ({"in_flight": 6}, ("decode-1", "decode-2"), columns)
    fewer = msgspec.structs.replace(old, instances=(one, two))
    assert difference(old, fewer) == ({"instances": (one, two)}, (), {})
    assert difference(old, old) == ({}, (), {})


async def test_metrics_text_has_every_promised_name_and_objectives_as_boundaries() -> None:
    classes = {"chat": TrafficClass(ttft_s=1.234, tpot_s=0.0567, e2e_s=77.7), "batch": TrafficClass()}
    async with front(Config(model=Model(name="m", engine="emulated"), classes=classes)) as f:
        f.reply(lambda spec: items(spec.request_id, "ab", "c", cached=1))
        headers = {"x-phaseplane-class": "chat"}
        for stream in (True, False):
            body = {"model": "m", "prompt": "xyz", "stream": stream}
            async with f.client.post("/v1/completions", json=body, headers=headers) as response:
                await response.read()
        async with f.client.get("/metrics") as response:
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            text = await response.text()
    lines = text.splitlines()
    for name in VLLM:
        assert any(re.match(rf"{name}(_bucket)?\{{.*model_name=\"m\"", line) for line in lines), name
    for line in (
        "phaseplane_orphaned_kv_blocks 0",
        'phaseplane_requests_total{class="chat",model="m",outcome="ok"} 2',
        'phaseplane_good_requests_total{class="chat",model="m"} 2',
        "phaseplane_placements_total 3",
        'phaseplane_ttft_seconds_bucket{class="chat",model="m",le="1.234"} 2',
        'phaseplane_ttft_seconds_bucket{class="batch",model="m",le="+Inf"} 0',
        'phaseplane_tpot_seconds_bucket{class="chat",model="m",le="0.0567"} 2',
        'phaseplane_e2e_seconds_bucket{class="chat",model="m",le="77.7"} 2',
        'vllm:prompt_tokens_total{engine="fleet",model_name="m"} 6',
        'vllm:generation_tokens_total{engine="fleet",model_name="m"} 8',
        'vllm:prefix_cache_hits_total{engine="fleet",model_name="m"} 2',
        'vllm:request_success_total{engine="fleet",model_name="m",finished_reason="stop"} 2',
        'vllm:num_requests_running{engine="decode-1",model_name="m"} 0',
        'phaseplane_instances{role="prefill",state="ready"} 1',
    ):
        assert line in lines, line
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))


def test_models_of_one_class_are_counted_apart() -> None:
    metrics = GatewayMetrics("served", {"chat": Slo(ttft_s=1.0, tpot_s=0.1)}, ["m", "n"])
    record = RequestRecord(
        request_id="r", model="n", traffic_class="chat", arrived_at=1.0, outcome="ok", finish_reason="stop",
        prompt_tokens=5, output_tokens=2, cached_tokens=0, ttft_s=0.5, tpot_s=0.05, e2e_s=1.0, max_itl_s=0.1, good=True,
    )  # fmt: skip
    metrics.finished(record)
    lines = metrics.render(fleet_state("prefill", "decode"), {}, {}).decode().splitlines()
    for line in (
        'phaseplane_requests_total{class="chat",model="n",outcome="ok"} 1',
        'phaseplane_good_requests_total{class="chat",model="m"} 0',
        'phaseplane_good_requests_total{class="chat",model="n"} 1',
        'phaseplane_ttft_seconds_bucket{class="chat",model="m",le="1"} 0',
        'phaseplane_ttft_seconds_bucket{class="chat",model="n",le="1"} 1',
        'phaseplane_tpot_seconds_count{class="chat",model="n"} 1',
    ):
        assert line in lines, line
    assert all(re.fullmatch(r"(# .*)|([a-zA-Z_:][\w:]*(\{.*\})? (\S+))", line) for line in lines)


def test_prometheus_numbers_labels_and_buckets() -> None:
    assert [number(value) for value in (1.0, 0.25, float("inf"), float("nan"), 7)] == ["1", "0.25", "+Inf", "NaN", "7"]
    assert sample("x", {"a": 'q"\\\n'}, 1) == 'x{a="q\\"\\\\\\n"} 1'
    histogram = Histogram((2.0, 1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 2.1):
        histogram.observe(value)
    assert [line.split()[-1] for line in histogram.lines("h", {})] == ["1", "3", "4", "6.6", "4"]


async def test_head_is_answered_like_get() -> None:
    async with front() as f, f.client.head("/healthz") as response:
        assert response.status == 200


async def test_json_errors_of_admin_bodies() -> None:
    async with front() as f, f.client.post("/v1/plans", data=b"{") as response:
        assert response.status == 400
        assert "JSON" in json.loads(await response.read())["error"]["message"]
