"""What a client folds from GET /v1/live is the server's state, whatever comes, goes, is missed or comes too late."""

from __future__ import annotations

import random

import msgspec
import pytest

from controlplane.gateway.live import MAX_FRAMES_KEPT, MAX_FRAMES_QUEUED, LiveFeed
from transfer.api import FleetState, Goodput, InstanceView, LiveFrame
from ui.feed import fold


class Fleet:
    """A state in which anything may change from one second to the next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.state = FleetState(
            xpyd="", models=(), instances=(), goodput=Goodput(), attainment=None, orphaned_kv_blocks=0, in_flight=0,
            version=0,
        )  # fmt: skip

    def change(self) -> None:
        draw = self.random
        ids = [view.id for view in self.state.instances]
        if draw.random() < 0.2:
            ids = sorted(draw.sample(["n0", "n1", "n2", "n3", "n4"], draw.randrange(6)))
        before = {view.id: view for view in self.state.instances}
        self.state = msgspec.structs.replace(
            self.state, xpyd=draw.choice(["1P1D", "2P1D"]), attainment=draw.choice([None, 0.5]),
            instances=tuple(self._instance(name) if draw.random() < 0.4 or name not in before else before[name]
                            for name in ids),
            stages_s=draw.choice([{}, {"queue": 0.5}]), goodput=Goodput(per_s=draw.choice([1.0, 2.0])),
        )  # fmt: skip

    def _instance(self, name: str) -> InstanceView:
        draw = self.random
        return InstanceView(
            id=name, role=draw.choice(["prefill", "decode"]), state=draw.choice(["ready", "lost"]), hardware="H20",
            model="m", epoch=draw.randrange(3), kv_use=draw.random(), latency_error=draw.choice([None, 0.1]),
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
async def test_a_client_has_the_servers_state_after_every_frame(seed: int) -> None:
    fleet = Fleet(seed)
    feed, draw = LiveFeed(lambda: fleet.state), fleet.random

    def seconds(num: int) -> None:
        for _ in range(num):
            if draw.random() < 0.9:
                fleet.change()
            feed.tick()

    subscription, state, seq, kinds = feed.subscribe(None), None, 0, []
    for _ in range(150):
        seconds(1)
        if draw.random() < 0.1:  # the connection is lost for a while
            feed.unsubscribe(subscription)
            seconds(draw.choice([0, 3, MAX_FRAMES_KEPT + 10]))
            nonsense = ["", "-1", "0", str(seq + 1000), "9" * 40]
            subscription = feed.subscribe(draw.choice([str(seq)] * 6 + nonsense))
        if draw.random() < 0.05:  # it reads too slowly
            seconds(draw.choice([MAX_FRAMES_QUEUED, MAX_FRAMES_QUEUED + 1, 1000]))
        if draw.random() < 0.2:
            continue
        for event in await subscription.get(feed.snapshot, 0.0):
            frame = msgspec.json.decode(event.partition(b"data: ")[2], type=LiveFrame)
            assert frame.kind == "snapshot" or frame.seq == seq + 1
            state, seq = fold(state, frame), frame.seq
            kinds.append(frame.kind)
        assert state == fleet.state
    assert min(kinds.count("snapshot"), kinds.count("delta")) > 5
