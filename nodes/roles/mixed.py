"""The mixed role: both phases on one instance, the colocated baseline. It also hands off to and takes from others."""

from __future__ import annotations

from nodes.roles.decode import DecodeRole
from nodes.roles.prefill import begin_prefill
from transfer.terms import Role
from transfer.wire.messages import Prefill


class MixedRole(DecodeRole):
    role = Role.MIXED

    def prefill(self, message: Prefill) -> None:
        begin_prefill(self.shell, message)
