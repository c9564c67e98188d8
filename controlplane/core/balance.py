"""Carries out the migrations that a placement policy asks for between decisions. Few at a time; asks every tick."""

from __future__ import annotations

from functools import partial

from controlplane.core.desk import Desk
from controlplane.core.lifecycle import RequestState
from controlplane.core.migration import Migrations
from controlplane.core.policies.protocol import Overview
from controlplane.core.policies.registry import POLICIES
from controlplane.core.residents import running_on


class Balance:
    def __init__(self, desk: Desk, migrations: Migrations) -> None:
        self._desk, self._migrations = desk, migrations

    def tick(self) -> None:
        desk = self._desk
        wanted = POLICIES[desk.config.policy].moves
        if wanted is None:
            return
        moving = sum(request.state is RequestState.MIGRATING for request in desk.requests.values())
        paces = [slo.tpot_s for slo in desk.config.classes.values() if slo is not None]
        for name in sorted(desk.fleet.groups):
            seen = Overview(
                group=desk.fleet.groups[name], tpot_s=min(paces, default=None), now=desk.now,
                memory=desk.memory(name),
                running=partial(running_on, desk),
            )  # fmt: skip
            for move in wanted(seen):
                if moving >= desk.config.max_migrations:
                    return
                request = desk.requests.get(move.request_id)
                if request is not None and request.num_failed_moves < desk.config.max_migration_attempts:
                    moving += self._migrations.start(request, move.source, move.target)
