"""A leg: one generation of one request on one instance, and the one place that cleans up after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nodes.core.events import (
    Add,
    Admitted,
    CannotPause,
    Computed,
    Emit,
    Gone,
    Grown,
    NotAdmitted,
    Paused,
    SequenceSpec,
)
from nodes.roles.fetch import PoolFetch
from nodes.roles.stream import PushStream

if TYPE_CHECKING:
    from nodes.roles.shell import BatchShell


class Leg:
    """One generation of one request here. begin -> (admitted) -> gone, or begin -> refused: exactly one end.

    Subclasses override what concerns them. All of it is called on the event loop and must not block.
    """

    def __init__(self, shell: BatchShell, spec: SequenceSpec) -> None:
        self.shell, self.spec = shell, spec
        self.request_id, self.generation = spec.request_id, spec.generation
        self.blocks: list[int] = []
        self.have_blocks = 0
        self.aborted: str | None = None
        self.forgotten = False
        """Its control plane is gone: the generation says nothing any more."""

    def begin(self) -> None:
        self.shell.handle(Add(spec=self.spec))

    def repeated(self) -> None:
        """The message that made this leg came again."""

    def started(self) -> None:
        """Its first chunk is in the step that starts now."""

    def stream(self) -> PushStream | None:
        """Where the KV of its steps goes."""
        return None

    def fetch(self) -> PoolFetch | None:
        """What brings its leading blocks from a pool."""
        return None

    def admitted(self, effect: Admitted) -> None:
        self.blocks, self.have_blocks = effect.blocks, effect.have_blocks

    def refused(self, effect: NotAdmitted) -> None:
        """Nothing was held."""

    def computed(self, effect: Computed) -> None:
        pass

    def grown(self, effect: Grown) -> None:
        self.blocks = effect.blocks

    def emitted(self, effect: Emit) -> None:
        pass

    def paused(self, effect: Paused) -> None:
        pass

    def cannot_pause(self, effect: CannotPause) -> None:
        pass

    def abort(self, reason: str) -> None:
        """End it. Gone follows, now or when what it waits for has let go of its blocks."""
        self.aborted = self.aborted or reason
        self.shell.drop(self, reason)

    def gone(self, effect: Gone) -> None:
        """It holds no block any more: after a finish, a hand-over, a drop, or, with `lost`, by the core's decision."""
