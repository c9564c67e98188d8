"""docs/feed.md names every series there is, and the bounds it gives are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from controlplane.core import series
from controlplane.core.config import CoreConfig
from controlplane.core.desk import Desk
from controlplane.core.readings import Readings
from controlplane.gateway import live
from transfer.screens import KvDetail
from ui.feed import STALE_S

TEXT = (Path(__file__).parents[2] / "docs" / "feed.md").read_text()
ONLY_WITH_TRAFFIC = {
    "attainment", "cost_per_good", "goodput_per_gpu", "kv_use", "pool_use", "hit_device", "hit_pool_dram",
    "hit_pool_ssd", "offered_per_s", "ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s",
}  # fmt: skip
INSTANCE = {"num_running", "num_waiting", "kv_use", "step_s", "speed"}
CLASS = {"goodput_per_s", "throughput_per_s", "attainment", "doomed"}


def test_every_series_is_named_and_no_other() -> None:
    table = TEXT.split("| series | what |")[1].split("\n\n")[0]
    named = set(re.findall(r"`([\w.]+)`", table))
    desk = Desk(CoreConfig(), 1, 0)
    desk.begin(1.0)
    found = {name for name in Readings(desk).take(1.0) if not name.startswith("class.")}
    assert found - named == set()
    of_others = {name for name in named if name.startswith((".", "class.", "model.", "instance."))}
    assert named - of_others <= found | ONLY_WITH_TRAFFIC
    suffixes = {name.rpartition(".")[2] for name in of_others}
    assert suffixes == INSTANCE | CLASS | {name for name in ONLY_WITH_TRAFFIC if name.startswith(("ttft", "tpot"))}


def test_the_bounds_are_those_of_the_code() -> None:
    for said in (
        f"{series.BYTES_A_SERIES:,} bytes a series", f"at most {series.MAX_SERIES} series",
        f"{series.BYTES_A_SERIES * series.MAX_SERIES / 1e6:.0f} MB", f"the last {live.MAX_FRAMES_KEPT} are kept",
        f"({live.MAX_FRAMES_QUEUED} frames behind)", f"stale from {STALE_S:g} s",
    ):  # fmt: skip
        assert said in " ".join(TEXT.split()), said
    assert f"until {series.MAX_POINTS} steps" in " ".join(TEXT.split())
    assert all(f"`{name}`" in TEXT for name in ("links", "prefixes", "caches"))
    assert {"links", "prefixes", "caches"} <= set(KvDetail.__struct_fields__)
