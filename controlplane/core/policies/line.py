"""In which order those who wait are tried by goodput.py, and when it is worth while to try at all."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from controlplane.core.fleet import Group
from controlplane.core.instance import Instance
from controlplane.core.lifecycle import Request
from controlplane.core.policies.memory import Memory

HORIZON_S = 0.1
"""Prefill queue up to which an instance is given more; one request beside the running one always."""
AGED_S = 30.0
"""So long after its deadline a request is tried before others."""
QUANTUM_TOKENS = 8192.0
"""Prompt tokens that a tenant may be ahead of another who waits, too."""
CROWDED_S = 0.02
"""So long nobody is asked for where decodes were what was short and nobody left them."""
INFINITE = float("inf")
_RANK = itemgetter(0, 1, 2, 3, 4)


def order(line: Sequence[Request], now: float, memory: Memory) -> list[Request]:
    """By priority; then those that can be good before those that cannot, but the one of these that has waited longest
    is first in line, after AGED_S, for what time is left to it. Tenants that had their share go behind others; then the
    earliest deadline."""
    tenants = {request.spec.tenant: 0.0 for request in line}
    most = INFINITE
    if len(tenants) > 1:
        tenants = {tenant: memory.shares.of(tenant) for tenant in tenants}
        most = min(tenants.values()) + QUANTUM_TOKENS
    rows, oldest, aged = [], -1, (INFINITE, INFINITE)
    for index, request in enumerate(line):
        spec, due_s = request.spec, request.due_s
        turn = 1 if due_s > now else 2
        if now - due_s >= AGED_S and (spec.priority, due_s) < aged:
            oldest, aged = index, (spec.priority, due_s)
        rows.append((spec.priority, turn, tenants[spec.tenant] > most, due_s, request.number, request))
    if oldest >= 0:
        rows[oldest] = (rows[oldest][0], 0, *rows[oldest][2:])
    rows.sort(key=_RANK)
    return [row[-1] for row in rows]


def num_rows(group: Group) -> int:
    """Requests that decode there or will."""
    return sum(one.rows for one in group.decodes) + sum(one.rows for one in group.mixed)


def free(group: Group, now: float, memory: Memory) -> bool:
    """Whether an instance takes more prompts that others have no claim on, and somebody left where decodes were what
    was short."""
    crowd = memory.crowded.get(group.model.name)
    if crowd is not None and now - crowd.at_s < CROWDED_S and num_rows(group) >= crowd.rows:
        return False
    return any(takes(one, now) for one in group.prefills or group.mixed)


def takes(one: Instance, now: float) -> bool:
    """Whether an instance is given more prompts."""
    return one.rows <= 1 or one.backlog_s(now) <= HORIZON_S
