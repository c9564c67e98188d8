"""Simulated instances whose engines keep KV to themselves or cannot move what runs, by the same core as real ones."""

from __future__ import annotations

import pytest
from sim_kit import anything, config, fleet, node, request, run

from controlplane.sim.spec import NodeSpec, Order


def test_a_drain_places_anew_what_cannot_move() -> None:
    trace = [request(0.02 * i, prompt=50, output=400) for i in range(12)]
    made = config(orders=(Order(at_s=1.0, xpyd="2P1D"),))
    _, result = run(fleet("p0 d0 d1", moves=False), trace, made)
    assert result.num_moves == 1
    assert {record.outcome for record in result.records} == {"ok"}
    assert all(record.output_tokens == 400 for record in result.records)
    assert sum(record.num_replaced for record in result.records) >= 1
    assert not sum(record.num_migrations + record.num_resumes for record in result.records)


def test_one_that_keeps_kv_to_itself_shares_the_work_and_nothing_else() -> None:
    trace = [
        request(0.05 * i, prompt=200, output=100, blocks=(1, 2, 3) if i % 3 else (), block_tokens=64) for i in range(60)
    ]
    nodes = [node("m0"), node("m1", shares_kv=False, moves=False), node("k0")]
    _, result = run(nodes, trace, config(keep_decisions=True))
    assert {record.outcome for record in result.records} == {"ok"}
    alone = [record for record in result.records if record.decode == "m1"]
    assert 10 <= len(alone) <= 50
    assert not [record for record in alone if record.kv_source or record.fetched_tokens]
    assert not [one for one in result.decisions if one.decode == "m1" and one.candidates[0].cached_tokens]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_the_books_balance(seed: int) -> None:
    nodes, trace, made = anything(seed)
    changed = [_served(one, seed + place) for place, one in enumerate(nodes)]
    _, result = run(changed, trace, made)
    solo = {one.id for one in changed if not one.shares_kv}
    assert not [one for one in result.decisions if one.prefill in solo or (one.decode in solo and one.prefill)]


def _served(spec: NodeSpec, number: int) -> NodeSpec:
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    if spec.id.startswith("k"):
        return spec
    return NodeSpec(**{**fields, "moves": number % 2 == 0, "shares_kv": not spec.id.startswith("m") or number % 3 != 0})
