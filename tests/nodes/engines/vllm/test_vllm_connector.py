"""The connector beside vLLM's scheduler: what becomes of KV that failed to load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_stand_in import connector_of

from nodes.engines.vllm.plan import PARAMS

SIZE = 32


@dataclass
class Request:
    """num_computed_tokens: as after the scheduler has planned a step."""

    request_id: str
    num_computed_tokens: int
    table: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    num_prompt_tokens: int = 100

    def get_block_ids(self) -> tuple[list[int]]:
        return (self.table,)


@dataclass
class Pool:
    evicted: set[int] = field(default_factory=set)

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted |= blocks


@pytest.fixture
def connector() -> Iterator[Any]:
    with connector_of(SIZE) as made:
        yield made


def step(connector: Any, *placed: Request) -> Any:
    for request in placed:
        external, _ = connector.get_num_new_matched_tokens(request, 0)
        connector.update_state_after_alloc(request, request, external)
    new = [SimpleNamespace(req_id=one.request_id, block_ids=(one.table,), num_computed_tokens=64) for one in placed]
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return connector.build_connector_meta(
        SimpleNamespace(
            num_scheduled_tokens={one.request_id: 36 for one in placed}, scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
        )
    )  # fmt: skip


def test_whoever_shares_blocks_that_failed_to_load_computes_them(connector: Any) -> None:
    """The one that was to load them may be aborted, and vLLM counts on it: the others would go on from KV that is
    none, and save what they make of it."""
    ticket = {PARAMS: {"job": 7, "num_loaded": 64, "num_tokens": 99}}
    loads, shares = (
        Request("a", 0, [3, 4, 5, 6], ticket),
        Request("b", 64, [3, 4, 8, 9], {PARAMS: ticket[PARAMS] | {"job": 8}}),
    )
    stranger, other = Request("c", 32, [3, 11]), Request("d", 64, [12, 13, 14], None)
    pool = Pool()
    connector.bind_gpu_block_pool(pool)
    assert [item.job for item in step(connector, loads, shares, stranger, other).items] == [7, 8]
    connector.update_connector_output(SimpleNamespace(invalid_block_ids={3, 4}))
    assert [one.num_computed_tokens for one in (loads, shares, stranger, other)] == [0, 0, 0, 64]
    assert pool.evicted == {3, 4, 5, 6, 8, 9, 11}


def test_those_of_an_earlier_step_are_left_alone(connector: Any) -> None:
    pool, earlier = Pool(), Request("a", 64, [3, 4, 5])
    connector.bind_gpu_block_pool(pool)
    step(connector, earlier)
    step(connector, Request("b", 64, [6, 7]))
    connector.update_connector_output(SimpleNamespace(invalid_block_ids={4}))
    assert (earlier.num_computed_tokens, pool.evicted) == (64, set())
