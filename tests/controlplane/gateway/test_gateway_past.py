"""The past over HTTP, the KV detail, and instances that are set aside."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from gateway_fakes import Front, front

from controlplane.config import Config, Model, Server
from controlplane.core.events import HoldWanted
from controlplane.core.series import SeriesBook, SeriesRow
from controlplane.gateway.past import sampling
from transfer.api import ActionView
from transfer.screens import Column, KvDetail, SeriesView

T = int(time.time()) // 10 * 10 - 1000
"""A while ago: the clock of this machine is what `since_s` counts from."""


async def series(f: Front, query: str) -> SeriesView:
    async with f.client.get(f"/v1/series?{query}") as response:
        assert response.status == 200, await response.text()
        return msgspec.json.decode(await response.read(), type=SeriesView)


def fill(f: Front) -> None:
    for second in range(30):
        f.gateway.series.put(T + second, {"a": float(second), "class.x.b": 1.0, "class.x.c": 2.0})


async def test_series_by_name_range_and_step() -> None:
    async with front() as f:
        fill(f)
        found = await series(f, f"names=a&since_s={T + 10}&until_s={T + 13}")
        assert found == SeriesView(
            step_s=1.0, times=(T + 10, T + 11, T + 12, T + 13), series={"a": Column(last=(10.0, 11.0, 12.0, 13.0))}
        )
        found = await series(f, f"names=a,class.x.*&names=nothing&since_s={T}&step_s=10")
        assert list(found.series) == ["a", "class.x.b", "class.x.c"]
        assert found.times == (T, T + 10, T + 20)
        assert found.series["a"] == Column(last=(9.0, 19.0, 29.0), low=(0.0, 10.0, 20.0), high=(9.0, 19.0, 29.0))
        ago = time.time() - T
        found = await series(f, f"names=a&since_s={-ago}&until_s={20 - ago}")
        assert found.series["a"].last == tuple(float(second) for second in range(21))
        assert (await series(f, "")).names == ("a", "class.x.b", "class.x.c")


@pytest.mark.parametrize(
    ("query", "named"),
    [("since_s=x", "since_s"), ("until_s=nan", "until_s"), ("step_s=0", "step_s"), ("step_s=-1", "step_s"),
     ("since_s=1e400", "since_s")],
)  # fmt: skip
async def test_nonsense_is_refused(query: str, named: str) -> None:
    async with front() as f, f.client.get(f"/v1/series?names=a&{query}") as response:
        assert response.status == 400
        assert named in (await response.json())["error"]["message"]


async def test_one_answer_has_a_bounded_number_of_series() -> None:
    async with front() as f:
        f.gateway.series.put(T, {f"instance.n{number}.kv_use": 1.0 for number in range(600)})
        async with f.client.get("/v1/series?names=*") as response:
            assert response.status == 400
            assert "600 series" in (await response.json())["error"]["message"]


def test_a_sample_a_second_is_written_down_and_ten_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    book, kept, clock = SeriesBook(), list[SeriesRow](), [float(T)]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    sample = sampling(book, lambda: {"x": clock[0] - T}, kept.append)
    for _ in range(21):
        sample()
        clock[0] += 1.0
    assert [(row.at_s, row.values["x"]) for row in kept] == [(T, (9.0, 0.0, 9.0)), (T + 10, (19.0, 10.0, 19.0))]


async def test_kv_is_the_schema_of_the_api() -> None:
    async with front() as f, f.client.get("/v1/kv") as response:
        assert msgspec.json.decode(await response.read(), type=KvDetail) == f.core.kv(0.0)


async def act(f: Front, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with f.client.post(f"/v1/instances/{path}", json=body, headers=headers) as response:
        return response.status, await response.json()


async def test_cordon_drain_and_resume() -> None:
    async with front() as f:
        for action in ("cordon", "drain", "resume"):
            status, body = await act(f, f"decode-1/{action}", {"base_version": 3, "actor": "ann"})
            assert status == 200
            assert msgspec.convert(body, ActionView).instance == f.core.fleet.instances[1]
        events = [event for event in f.core.events if isinstance(event, HoldWanted)]
        assert [(event.instance_id, event.action, event.apply.actor) for event in events] == [
            ("decode-1", action, "ann") for action in ("cordon", "drain", "resume")
        ]
        assert all(event.at_s > 1e9 for event in events)
        assert (await act(f, "decode-1/explode", {"base_version": 3}))[0] == 404
        for wrong in ({}, {"base_version": -1}, {"base_version": 1, "idempotency_key": "x" * 257}):
            assert (await act(f, "decode-1/cordon", wrong))[0] == 400, wrong
        f.core.refusal = (409, "it is the last one")
        status, body = await act(f, "decode-1/cordon", {"base_version": 3})
        assert (status, body["error"]["message"]) == (409, "it is the last one")


async def test_with_keys_the_actor_is_whose_key_it_was() -> None:
    config = Config(model=Model(name="m", engine="emulated"), server=Server(api_keys={"alice": "sk-12345678"}))
    async with front(config) as f:
        body = {"base_version": 1, "actor": "mallory"}
        assert (await act(f, "decode-1/drain", body, Authorization="Bearer sk-12345678"))[0] == 200
        assert (await act(f, "decode-1/drain", body))[0] == 401
        (event,) = (event for event in f.core.events if isinstance(event, HoldWanted))
        assert event.apply.actor == "alice"


@pytest.mark.parametrize(("host", "settings", "status"), [
    ("evil.example", Server(), 403), ("evil.example:80", Server(), 403), ("127.0.0.1.evil.example", Server(), 403),
    ("localhost:1", Server(), 200), ("[::1]:8000", Server(), 200), ("127.0.0.1", Server(), 200),
    ("fleet.local:80", Server(allowed_hosts=("Fleet.local",)), 200),
    ("evil.example", Server(api_keys={"alice": "sk-12345678"}), 200),
])  # fmt: skip
async def test_a_name_that_others_pointed_here_is_refused(host: str, settings: Server, status: int) -> None:
    """DNS rebinding: to the browser such a page and this server are one site, so that it may read every answer."""
    config = Config(model=Model(name="m", engine="emulated"), server=settings)
    async with front(config) as f:
        headers = {"Host": host, "Authorization": "Bearer sk-12345678"}
        for path in ("/v1/fleet", "/v1/live", "/metrics", "/healthz"):
            async with f.client.get(path, headers=headers) as response:
                assert response.status == status, path
        if status == 403:
            async with f.client.get("/v1/fleet", headers=headers) as response:
                assert "server.allowed_hosts" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(("site", "keys", "status"), [
    ("cross-site", {}, 403), ("same-origin", {}, 200), (None, {}, 200), ("cross-site", {"alice": "sk-12345678"}, 200),
])  # fmt: skip
async def test_without_keys_a_page_of_another_site_cannot_have_a_browser_act(
    site: str | None, keys: dict[str, str], status: int
) -> None:
    config = Config(model=Model(name="m", engine="emulated"), server=Server(api_keys=keys))
    async with front(config) as f:
        headers = {"Sec-Fetch-Site": site} if site else {}
        headers |= {"Authorization": "Bearer sk-12345678"} if keys else {}
        assert (await act(f, "decode-1/drain", {"base_version": 3}, **headers))[0] == status
        async with f.client.get("/v1/fleet", headers=headers) as response:
            assert response.status == 200, "it cannot read the answer"
