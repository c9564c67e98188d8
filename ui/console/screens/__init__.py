"""The console's pages, in the order of its menu. Each module has `draw(frame)`; the strip above it is the script's."""

from __future__ import annotations

from collections.abc import Callable

from ui.console.frame import Frame
from ui.console.screens import (
    audit,
    instances,
    kv,
    overview,
    planner,
    playground,
    rebalance,
    replay,
    requests,
    traffic,
)

Draw = Callable[[Frame], None]

FIRST = "overview"
PAGES: dict[str, Draw] = {
    FIRST: overview.draw,
    "rebalance": rebalance.draw,
    "instances": instances.draw,
    "requests": requests.draw,
    "kv": kv.draw,
    "playground": playground.draw,
    "replay": replay.draw,
    "audit": audit.draw,
    "traffic": traffic.draw,
    "planner": planner.draw,
}


def bound(draw: Draw, frame: Frame) -> Callable[[], None]:
    """A page for one run of the script."""

    def page() -> None:
        draw(frame)

    return page
