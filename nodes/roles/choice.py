"""Which role an instance with an engine has, what it is given for it, and why it may not take another."""

from __future__ import annotations

from collections.abc import Callable

from nodes.core.residency import BatchConfig
from nodes.engines.engine import Engine
from nodes.engines.served import ServedEngine
from nodes.roles.base import BatchRole, InstanceRole
from nodes.roles.context import RoleContext
from nodes.roles.decode import DecodeRole
from nodes.roles.mixed import MixedRole
from nodes.roles.prefill import PrefillRole
from nodes.roles.shell import BatchShell
from transfer.errors import InvalidValue
from transfer.terms import InstanceId, Role
from transfer.wire.messages import RoleOrder

ENGINE_ROLES: dict[Role, type[BatchRole]] = {
    Role.PREFILL: PrefillRole,
    Role.DECODE: DecodeRole,
    Role.MIXED: MixedRole,
}


def engine_role(role: Role, context: RoleContext, failed: Callable[[Exception], None]) -> BatchRole:
    """Raises InvalidValue for a role that the engine cannot serve."""
    if not context.shares_kv and role is not Role.MIXED:
        raise InvalidValue(_keeps_kv(context.instance_id, role))
    return ENGINE_ROLES[role](BatchShell(context, failed))


def batch_config(
    engine: Engine | ServedEngine, *, token_budget: int, max_running: int, prefix_cache: bool
) -> BatchConfig:
    """Of this engine; one that keeps its KV to itself has its prefix cache there."""
    max_context = engine.model.max_context
    if isinstance(engine, ServedEngine):
        prefix_cache = prefix_cache and engine.shares_kv
        max_context = min(max_context, engine.max_length)
    return BatchConfig(
        num_blocks=engine.num_blocks, block_size=engine.layout.block_size, max_context=max_context,
        token_budget=token_budget, max_running=max_running, eos_token_ids=engine.model.eos_token_ids,
        prefix_cache=prefix_cache,
    )  # fmt: skip


def why_not(order: RoleOrder, role: InstanceRole, name: InstanceId, epoch: int) -> str | None:
    """Why a role order cannot be followed now, in a sentence."""
    if order.epoch != epoch:
        return f"{name} was restarted since the order was given; look at the fleet again"
    if order.role is role.role:
        return None
    if Role.KV_POOL in (order.role, role.role):
        return f"{name} is a {role.role} and cannot become a {order.role}: one has an engine, the other only memory"
    if isinstance(role, BatchRole) and not role.shell.context.shares_kv:
        return _keeps_kv(name, order.role)
    if not role.idle:
        held = role.holdings()
        return f"{name} is not idle: it holds KV for {len(held)} requests; drain it first"
    return None


def _keeps_kv(name: InstanceId, role: Role) -> str:
    return (
        f"{name} cannot be a {role} instance: its engine keeps its KV to itself and serves whole requests only (mixed)"
    )
