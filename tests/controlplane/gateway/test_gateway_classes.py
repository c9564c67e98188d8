"""GET and PUT /v1/classes: what reaches the core, whose change it is, and what is refused at the door."""

from __future__ import annotations

import msgspec
from gateway_fakes import front

from controlplane.config import Config, Model, Server
from controlplane.core.events import ClassesWanted
from transfer.classes import ClassesRequest, ClassesView
from transfer.terms import Slo


async def test_a_change_reaches_the_core_and_the_view_comes_back() -> None:
    async with front() as f:
        async with f.client.get("/v1/classes") as response:
            assert msgspec.json.decode(await response.read(), type=ClassesView).classes[0].name == "default"
        change = {"default": {"ttft_s": 1, "tpot_s": 0.1}, "batch": None}
        async with f.client.put("/v1/classes", json={"base_version": 2, "classes": change, "actor": "bob"}) as response:
            assert (response.status, (await response.json())["version"]) == (200, 2)
        (event,) = f.core.of(ClassesWanted)
        assert isinstance(event, ClassesWanted)
        assert event.change == ClassesRequest(2, {"default": Slo(1.0, 0.1), "batch": None}, "bob")
        assert event.at_s > 1e9
        f.core.refusal = (409, "the fleet changed")
        async with f.client.put("/v1/classes", json={"base_version": 1, "classes": {}}) as response:
            assert (response.status, (await response.json())["error"]["message"]) == (409, "the fleet changed")


async def test_what_are_no_objectives_is_refused() -> None:
    async with front() as f:
        for change in (
            {"ttft_s": 1}, {"ttft_s": "fast", "tpot_s": 1}, "fast",
        ):  # fmt: skip
            body = {"base_version": 1, "classes": {"default": change}}
            async with f.client.put("/v1/classes", json=body) as response:
                assert response.status == 400, change
        assert f.core.of(ClassesWanted) == []


async def test_who_changes_it_is_the_tenant_where_there_are_keys() -> None:
    config = Config(
        model=Model(name="m", engine="emulated", max_context=4096), server=Server(api_keys={"alice": "long secret"})
    )
    async with front(config) as f:
        body = {"base_version": 1, "classes": {}, "actor": "bob"}
        headers = {"Authorization": "Bearer long secret"}
        async with f.client.put("/v1/classes", json=body, headers=headers) as response:
            assert response.status == 200
        (event,) = f.core.of(ClassesWanted)
        assert isinstance(event, ClassesWanted)
        assert event.change.actor == "alice"
