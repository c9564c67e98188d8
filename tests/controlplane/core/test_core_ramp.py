"""A KV pool that joins others takes new prefixes little by little (Mooncake#3688)."""

from __future__ import annotations

import pytest
from core_kit import Rig, config, sends

from controlplane.core.events import NodeLost
from transfer.terms import Role
from transfer.wire.messages import PoolMap


def wait(rig: Rig, seconds: float) -> None:
    rig.wait(seconds, [one.id for one in rig.core.state(rig.now).instances if one.state != "lost"])


def weights(rig: Rig) -> list[dict[str, float]]:
    """As p0 was told, map by map."""
    maps = [message for name, message in sends(rig.all_effects, PoolMap) if name == "p0"]
    return [{one.instance_id: one.weight for one in pools.pools} for pools in maps]


def test_pools_that_begin_together_share_evenly_at_once() -> None:
    rig = Rig()
    rig.fleet("1P1D3K")
    wait(rig, 2.0)
    assert weights(rig)[-1] == {"k0": 1.0, "k1": 1.0, "k2": 1.0}
    count = len(weights(rig))
    wait(rig, 90.0)
    assert len(weights(rig)) == count, "nothing changes, nothing is told"


@pytest.mark.parametrize("ramp_s", [60.0, 12.0])
def test_a_pool_that_joins_later_ramps_up_in_a_few_steps(ramp_s: float) -> None:
    rig = Rig(config(ramp_s=ramp_s))
    rig.fleet("1P1D2K")
    wait(rig, 20.0)
    before = len(weights(rig))
    joined_s = rig.now
    rig.join("k9", Role.KV_POOL)
    assert weights(rig)[-1] == {"k0": 1.0, "k1": 1.0, "k9": 0.1}
    wait(rig, ramp_s / 2 + 1.0)
    assert weights(rig)[-1]["k9"] == pytest.approx(0.55)
    wait(rig, ramp_s / 2 + 1.0)
    told = [one["k9"] for one in weights(rig)[before:]]
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.1, 1.0)
    assert len(told) == 7
    assert rig.now - joined_s <= ramp_s + 2.1
    wait(rig, 60.0)
    assert len(weights(rig)) == before + 7, "not told again once it is warm"


def test_a_pool_heard_again_in_the_same_life_is_as_warm_as_before_and_a_new_life_is_not() -> None:
    rig = Rig()
    rig.fleet("1P1D2K")
    wait(rig, 20.0)
    rig.do(NodeLost(instance_id="k1"))
    rig.beat("k1")
    assert weights(rig)[-1] == {"k0": 1.0, "k1": 1.0}
    rig.join("k1", Role.KV_POOL, epoch=2)
    assert weights(rig)[-1] == {"k0": 1.0, "k1": 0.1}


def test_without_a_ramp_it_takes_its_share_at_once() -> None:
    rig = Rig(config(ramp_s=0.0))
    rig.fleet("1P1D1K")
    wait(rig, 20.0)
    rig.join("k9", Role.KV_POOL)
    assert weights(rig)[-1] == {"k0": 1.0, "k9": 1.0}
