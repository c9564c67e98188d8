"""The endpoints over ZeroMQ, in one import. See endpoint.py for the guarantees and frames.py for what travels."""

from __future__ import annotations

from transfer.wire.dealer import DealerEndpoint
from transfer.wire.router import RouterEndpoint

__all__ = ["DealerEndpoint", "RouterEndpoint"]
