"""What the connector moves, decided without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from nodes.engines.vllm.plan import PARAMS, Progress, Requests, StepItem, num_sound, read_ticket


def params(num_loaded: int, num_tokens: int, job: int = 5) -> dict[str, Any]:
    return {PARAMS: {"job": job, "num_loaded": num_loaded, "num_tokens": num_tokens}}


def schedule(requests: Requests, num_local: int, num_loaded: int, num_prompt: int, step: int) -> StepItem:
    external = requests.num_external("r", params(num_loaded, num_prompt - 1), num_prompt, num_local)
    requests.allocated("r", external)
    item = requests.scheduled("r", [3, 4, 5], num_local + external, step, fresh=True)
    assert item is not None
    return item


def test_tokens_in_the_arena_are_taken_beyond_those_vllm_has() -> None:
    assert schedule(Requests(), num_local=32, num_loaded=70, num_prompt=80, step=10) == StepItem(
        5, [3, 4, 5], start=70, end=80, load_from=32, fresh=True
    )
    assert schedule(Requests(), num_local=64, num_loaded=40, num_prompt=80, step=16).load_from == 64


def test_the_last_token_of_a_prompt_is_computed_even_when_it_is_there() -> None:
    requests = Requests()
    assert requests.num_external("r", params(80, 80), 80, 0) == 79
    assert requests.num_external("r", params(80, 80), 80, 0) == 79  # vLLM may ask again
    assert len(requests) == 1


def test_requests_without_a_ticket_leave_no_trace() -> None:
    requests = Requests()
    for wrong in (None, {}, {PARAMS: 3}, {PARAMS: {"job": 1}}, {PARAMS: {"job": -1, "num_loaded": 0, "num_tokens": 1}}):
        assert read_ticket(wrong) is None
        assert requests.num_external("x", wrong, 100, 0) == 0
    assert requests.scheduled("x", [1], 0, 100, fresh=True) is None
    assert requests.finished("x") is None
    assert len(requests) == 0


def test_tables_grow_and_are_replaced_after_a_preemption() -> None:
    requests = Requests()
    schedule(requests, 0, 0, 200, 64)
    grown = requests.scheduled("r", [9], 64, 64, fresh=False)
    assert grown == StepItem(5, [3, 4, 5, 9], 64, 128, 64, fresh=False)
    assert requests.scheduled("r", [7], 0, 32, fresh=True) == StepItem(5, [7], 0, 32, 0, fresh=True)
    assert requests.finished("r") == 5


def test_steps_past_the_wanted_tokens_concern_nobody() -> None:
    requests = Requests()
    schedule(requests, 0, 0, 80, 80)
    assert requests.scheduled("r", None, 80, 1, fresh=False) is None
    assert requests.scheduled("r", None, 32, 48, fresh=False) is not None  # a load failed: it is computed again


def steps(progress: Progress, *bounds: tuple[int, int]) -> list[range]:
    found = []
    for start, end in bounds:
        item = StepItem(5, [], start, end, start, fresh=start == bounds[0][0])
        progress.begin(item)
        found.append(progress.complete(item))
    return found


def test_blocks_are_saved_once_as_they_fill() -> None:
    progress = Progress(block_size=32, num_tokens=79, save_from=0)
    assert steps(progress, (0, 20), (20, 70), (70, 80)) == [range(0), range(2), range(2, 3)]
    assert progress.complete(StepItem(5, [], 80, 81, 80, fresh=False)) == range(3, 3)


def test_saving_begins_where_it_is_wanted() -> None:
    assert steps(Progress(32, 79, save_from=1), (40, 80)) == [range(1, 3)]
    assert steps(Progress(32, 79, save_from=3), (78, 80)) == [range(3, 3)]


@pytest.mark.parametrize("failed_at", [0, 32])
def test_nothing_computed_on_kv_that_failed_to_load_is_saved(failed_at: int) -> None:
    progress = Progress(32, 127, save_from=1)
    first = StepItem(5, [], 64, 96, failed_at, fresh=True)
    progress.begin(first)
    progress.load_failed(failed_at)
    assert progress.complete(first) == range(0)
    assert progress.complete(StepItem(5, [], 96, 128, 96, fresh=False)) == range(0)  # scheduled before vLLM knew
    assert progress.complete(StepItem(5, [], failed_at, 100, failed_at, fresh=False)) == range(1, 3)
    assert progress.complete(StepItem(5, [], 100, 128, 100, fresh=False)) == range(3, 4)


def test_a_preempted_request_saves_no_block_twice() -> None:
    progress = Progress(32, 127, save_from=0)
    assert steps(progress, (0, 64)) == [range(2)]
    assert steps(progress, (0, 96)) == [range(2, 3)]


def test_what_follows_a_block_that_failed_to_load_is_not_sound() -> None:
    assert num_sound([3, 4, 5], {4, 5}) == 1
    assert num_sound([3, 4, 5], {99}) == 3
