"""The autopilot's endpoints: state, mode, limits and pins reach the core, refusals reach the client."""

from __future__ import annotations

from typing import Any

import msgspec
from gateway_fakes import Front, front, until

from controlplane.config import Config, Model, Server
from controlplane.core.events import Audit, AutopilotWanted, Effect, Event
from transfer.api import AuditRow
from transfer.autopilot import AutopilotView


async def call(f: Front, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
    async with f.client.request(method, path, json=body, **more) as response:
        return response.status, await response.json()


async def test_the_state_is_the_schema_of_the_api() -> None:
    async with front() as f, f.client.get("/v1/autopilot") as response:
        view = msgspec.json.decode(await response.read(), type=AutopilotView)
        assert (view.mode, view.line) == ("advise", "hold: no traffic")


async def test_changes_pins_and_releases_reach_the_core() -> None:
    async with front() as f:
        assert (await call(f, "PUT", "/v1/autopilot", {"mode": "auto", "floor": 2}))[0] == 200
        assert (await call(f, "POST", "/v1/autopilot/pins", {"subject": "d1", "ttl_s": 60, "actor": "bob"}))[0] == 200
        status, body = await call(f, "DELETE", "/v1/autopilot/pins/a%20b?actor=bob")
        assert (status, body["mode"]) == (200, "advise")
        change, pin, unpin = f.core.of(AutopilotWanted)
        assert isinstance(change, AutopilotWanted)
        assert isinstance(pin, AutopilotWanted)
        assert isinstance(unpin, AutopilotWanted)
        assert change.change is not None
        assert (change.change.mode, change.change.floor, change.change.max_moves) == ("auto", 2, None)
        assert pin.pin is not None
        assert (pin.pin.subject, pin.pin.ttl_s, pin.pin.actor) == ("d1", 60.0, "bob")
        assert (unpin.unpin, unpin.actor) == ("a b", "bob")


async def test_nonsense_and_refusals_are_answers() -> None:
    async with front() as f:
        for method, path, body in (
            ("PUT", "/v1/autopilot", {"mode": "on"}), ("PUT", "/v1/autopilot", {"floor": 0}),
            ("POST", "/v1/autopilot/pins", {"ttl_s": -1}), ("POST", "/v1/autopilot/pins", {"subject": ""}),
            ("DELETE", "/v1/autopilot/pins/x?actor=" + "y" * 300, None),
        ):  # fmt: skip
            assert (await call(f, method, path, body))[0] == 400, (method, path, body)
        assert f.core.of(AutopilotWanted) == []
        f.core.refusal = (404, "'x' is not pinned")
        status, body = await call(f, "DELETE", "/v1/autopilot/pins/x")
        assert (status, body["error"]["message"]) == (404, "'x' is not pinned")


async def test_who_changes_it_is_the_tenant_where_there_are_keys() -> None:
    config = Config(
        model=Model(name="m", engine="emulated", max_context=4096), server=Server(api_keys={"alice": "long secret"})
    )
    async with front(config) as f:
        headers = {"Authorization": "Bearer long secret"}
        await call(f, "PUT", "/v1/autopilot", {"mode": "off", "actor": "mallory"}, headers=headers)
        event = f.core.of(AutopilotWanted)[0]
        assert isinstance(event, AutopilotWanted)
        assert event.change is not None
        assert event.change.actor == "alice"
        assert (await call(f, "GET", "/v1/autopilot"))[0] == 401


async def test_audit_rows_without_a_time_get_the_present_one() -> None:
    def handle(event: Event, now: float) -> list[Effect]:
        return [Audit(row=AuditRow(at_s=at_s, actor="autopilot", action="hold", subject="m")) for at_s in (0.0, 5.0)]

    async with front() as f:
        f.core.handle = handle  # type: ignore[method-assign]
        f.plane.scheduler.tick()
        await until(lambda: len(f.archive.rows) >= 2)
        assert f.archive.rows[0].at_s > 1.6e9
        assert f.archive.rows[1].at_s == 5.0
