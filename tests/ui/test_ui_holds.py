"""cordon, drain and resume as a user meets them; and the client's calls for screens."""

from __future__ import annotations

import json

import msgspec
import pytest
from ui_fakes import Fake, a_kv_detail

from transfer.api import ActionView, ApplyRequest, LiveFrame
from transfer.screens import Column
from ui.client import FleetClient
from ui.errors import ApiError, Unreachable
from ui.feed import follow


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("cordon", "cpu-1 is cordoned: nothing new is placed on it; 2 requests are left on it"),
        ("drain", "what runs there moves away; 2 requests are left on it"),
        ("resume", "decode instance cpu-1 is ready: it serves again\n"),
    ],
)
def test_an_action_is_sent_against_the_version_that_was_seen(run, fleet, action, said):
    ran = run(action, "cpu-1", "--url", fleet.url)
    assert ran.code == 0
    assert said in ran.out
    method, body = fleet.asked[-1]
    assert method == f"POST /v1/instances/cpu-1/{action}"
    assert body["base_version"] == fleet.fleet.version
    assert len(body["idempotency_key"]) == 32
    found = msgspec.convert(json.loads(run(action, "cpu-1", "--json", "--url", fleet.url).out), ActionView)
    assert found.num_left == 2


def test_a_refusal_is_the_control_planes_sentence(run, fleet):
    fleet.apply_status = 409
    ran = run("drain", "cpu-1", "--url", fleet.url)
    assert ran.code == 1
    assert "cpu-1 is the last ready decode instance of tiny" in ran.err


async def test_series_kv_and_holds_of_the_client(fleet: Fake):
    async with FleetClient(fleet.url) as client:
        found = await client.series(["kv_use", "class.a b.x"], since_s=-60, step_s=2.0, until_s=5.5)
        assert found.series == {"kv_use": Column(last=(0.5, None))}
        asked = fleet.asked[-1][0]
        assert asked == "GET /v1/series?since_s=-60&step_s=2.0&names=kv_use,class.a+b.x&until_s=5.5"
        assert await client.kv() == a_kv_detail()
        wanted = ApplyRequest(base_version=4)
        assert [
            (await act("cpu-0", wanted)).instance.state for act in (client.cordon, client.drain, client.resume)
        ] == ["cordoned", "draining", "ready"]


async def test_the_feed_follows_a_real_stream(fleet: Fake):
    fleet.deltas = (LiveFrame(seq=2, kind="delta", changed={"in_flight": 9}),)
    async with FleetClient(fleet.url) as client:
        feed = follow(client)
        async with client.live() as events:
            async for event in events:
                await feed.take(event)
        assert feed.state == msgspec.structs.replace(fleet.fleet, in_flight=9)
        assert fleet.headers[-1].get("Last-Event-ID") is None
        async with client.live("2"):
            assert fleet.headers[-1]["Last-Event-ID"] == "2"
        fleet.api_key = "sk-1"
        with pytest.raises(ApiError, match="wants an API key"):
            async with client.live():
                pass
    async with FleetClient("http://127.0.0.1:9") as client:
        with pytest.raises(Unreachable, match="no fleet answers"):
            async with client.live():
                pass
