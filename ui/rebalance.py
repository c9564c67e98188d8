"""Asks for a plan, applies it and follows it to its end. What a plan does is decided by the control plane."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from transfer.api import ApplyRequest, Plan, PlanRequest, PlanStep, Prediction
from transfer.terms import Role, Struct
from ui.client import FleetClient
from ui.errors import ApiError, CliError, Unreachable

POLL_S = 0.2
LOST_AFTER_S = 30.0
"""How long the control plane may be unreachable while a plan runs."""

MEASURE_S = 30.0
"""Longest wait for the effect of a plan to be measured."""
RUNNING = ("planned", "applying")
BAD_REQUEST = 400
MAX_SHAPES = 6

ENGINE_ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)

OnPlan = Callable[[Plan], None]


class RebalanceReport(Struct, frozen=True):
    """What `phaseplane rebalance --json` prints."""

    plan_id: str
    status: str
    before: str
    after: str
    steps: tuple[PlanStep, ...]
    predicted: Prediction
    measured: Prediction | None
    risks: tuple[str, ...]
    failed: str | None


def report_of(plan: Plan) -> RebalanceReport:
    return RebalanceReport(
        plan_id=plan.plan_id, status=plan.status, before=plan.before, after=plan.after, steps=plan.steps,
        predicted=plan.predicted, measured=plan.measured, risks=plan.risks, failed=plan.failed,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Follow:
    """How long to follow a plan that runs, and whether to wait for what the control plane then measures."""

    timeout_s: float
    measure: bool = True


async def rebalance(client: FleetClient, xpyd: str, dry_run: bool, follow: Follow, on_plan: OnPlan) -> Plan:
    """Plan and, unless dry_run, apply; returns the finished plan. Raises CliError when it is refused or late."""
    plan = await propose(client, PlanRequest(xpyd=xpyd))
    on_plan(plan)
    return plan if dry_run or not plan.steps else await carry_out(client, plan, follow, on_plan)


async def propose(client: FleetClient, wanted: PlanRequest) -> Plan:
    """The dry run. Raises CliError with the shapes this fleet can have where another one was asked for."""
    try:
        return await client.plan(wanted)
    except ApiError as error:
        if error.status != BAD_REQUEST or wanted.xpyd is None:
            raise
        raise await _with_shapes(client, error) from None


async def carry_out(client: FleetClient, plan: Plan, follow: Follow, on_plan: OnPlan) -> Plan:
    """Apply a plan against the version it was made for, and follow it to its end."""
    request = ApplyRequest(base_version=plan.base_version, idempotency_key=uuid.uuid4().hex)
    return await _follow(client, plan.plan_id, client.apply(plan.plan_id, request), follow, on_plan)


async def _with_shapes(client: FleetClient, refused: ApiError) -> CliError:
    """The refusal, and what this fleet could be instead."""
    said = str(refused).partition("; run `phaseplane status")[0]
    fleet = await client.fleet()
    count = sum(view.role in ENGINE_ROLES for view in fleet.instances if view.state != "lost")
    return CliError(
        f"{said}. This fleet is {fleet.xpyd}, {count} instances that can change role: it can be {shapes(count)}; "
        "`phaseplane up --prefill 2 --decode 1` starts one of three"
    )


def shapes(count: int) -> str:
    """What `count` instances can be, in words: every instance in one role, and the fleet able to serve."""
    if count <= 1:
        return "1M" if count else "nothing until an instance joins"
    splits = [f"{prefill}P{count - prefill}D" for prefill in range(1, count)]
    named = ", ".join(splits) if len(splits) <= MAX_SHAPES else f"{splits[0]}, {splits[1]} and so on to {splits[-1]}"
    return f"{named}, {count}M, or with some of them mixed" if count > 2 else f"{named} or {count}M"


async def undo(client: FleetClient, plan_id: str, follow: Follow, on_plan: OnPlan) -> Plan:
    """Apply the inverse of a plan against the fleet as it is now."""
    fleet = await client.fleet()
    request = ApplyRequest(base_version=fleet.version, idempotency_key=uuid.uuid4().hex)
    inverse = await client.undo(plan_id, request)
    return await _follow(client, inverse.plan_id, _answered(inverse), follow, on_plan)


async def _follow(
    client: FleetClient, plan_id: str, applying: Awaitable[Plan], follow: Follow, on_plan: OnPlan
) -> Plan:
    """Show a plan's progress until it ends, whether the control plane answers at once or at the end."""
    try:
        async with asyncio.timeout(follow.timeout_s):
            plan = await applying
            on_plan(plan)
            while plan.status in RUNNING:
                await asyncio.sleep(POLL_S)
                plan = await _look(client, plan_id)
                on_plan(plan)
    except TimeoutError:
        raise CliError(
            f"plan {plan_id} has not ended within {follow.timeout_s:g} s and goes on; "
            f"run `phaseplane status --url {client.url}`"
        ) from None
    return await _measured(client, plan, on_plan) if follow.measure and plan.status == "done" else plan


async def _look(client: FleetClient, plan_id: str) -> Plan:
    """The plan as it is now; a control plane that is away for a moment does not end the watch."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LOST_AFTER_S
    while True:
        try:
            return await client.get_plan(plan_id)
        except Unreachable:
            if loop.time() > deadline:
                raise
        await asyncio.sleep(POLL_S)


async def _measured(client: FleetClient, plan: Plan, on_plan: OnPlan) -> Plan:
    """Wait for the end of the window in which the effect is measured: `measured` then changes."""
    at_first = plan.measured
    with contextlib.suppress(TimeoutError, CliError):  # the plan itself is done
        async with asyncio.timeout(MEASURE_S):
            while plan.status == "done" and plan.measured == at_first:
                await asyncio.sleep(POLL_S)
                plan = await client.get_plan(plan.plan_id)
            on_plan(plan)
    return plan


async def _answered(plan: Plan) -> Plan:
    return plan
