"""How tests ask for plans, apply them and play the node's part in them."""

from __future__ import annotations

from core_kit import Rig, only, those

from controlplane.core.events import (
    ApplyWanted,
    PlanReady,
    PlanRefused,
    PlanWanted,
)
from transfer.api import ApplyRequest, Plan, PlanRequest
from transfer.terms import Role
from transfer.wire.messages import (
    RoleReport,
)


def plan(rig: Rig, xpyd: str | None = None, moves: dict[str, str] | None = None) -> Plan:
    return only(rig.do(PlanWanted(ask_id="a", request=PlanRequest(xpyd=xpyd, moves=moves))), PlanReady).plan


def refused(rig: Rig, xpyd: str | None = None, moves: dict[str, str] | None = None) -> PlanRefused:
    return only(rig.do(PlanWanted(ask_id="a", request=PlanRequest(xpyd=xpyd, moves=moves))), PlanRefused)


def apply(
    rig: Rig, plan_id: str, *, key: str = "", version: int | None = None, undo: bool = False
) -> Plan | PlanRefused:
    asked = ApplyRequest(base_version=rig.core.version if version is None else version, idempotency_key=key)
    effects = rig.do(ApplyWanted(ask_id="b", plan_id=plan_id, apply=asked, undo=undo, at_s=5000.0))
    ready = those(effects, PlanReady)
    return ready[0].plan if ready else only(effects, PlanRefused)


def report(rig: Rig, name: str, role: Role, *, ok: bool = True, detail: str = "") -> None:
    plan_id = rig.core.plans()[0].plan_id
    rig.node(name, RoleReport(plan_id=plan_id, epoch=rig.instance(name).epoch, role=role, ok=ok, detail=detail))


def drain(rig: Rig, num: int, name: str = "d0") -> Plan:
    """A plan that takes a decode instance with `num` running requests out."""
    for index in range(num):
        rig.decoding(f"r{index}")
    running = [index for index in range(num) if rig.request(f"r{index}").decode == name]
    assert running
    made = plan(rig, moves={name: "prefill"})
    applied = apply(rig, made.plan_id)
    assert isinstance(applied, Plan)
    return applied


def finish(rig: Rig) -> None:
    """Carry the newest plan through on idle instances."""
    for step in rig.core.plans()[0].steps:
        report(rig, step.instance_id, Role(step.to_role))
        rig.beat(step.instance_id)
    assert rig.core.plans()[0].status == "done"
