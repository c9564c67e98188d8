"""What a request generated is given arena blocks when it has ended, where there is room, and the next one finds it."""

from __future__ import annotations

import pytest
from requests_kit import none_of, only, spec
from served_harness import SIZE, ServedHarness, served_config

from nodes.core.events import Admitted, Cached, HandsChanged, Work
from nodes.core.jobs import Kept, Launch

A = ("a", 1)


@pytest.fixture
def h() -> ServedHarness:
    """A request of 7 tokens has ended with 8 more: KV of 14, 3 whole blocks, of which the prompt's one is cached."""
    h = ServedHarness(served_config(num_blocks=24))
    h.add(spec("a", [1, 2, 3, 4, 5, 6, 1]))
    h.finish(A)
    return h


def test_the_next_turn_finds_the_answer(h: ServedHarness) -> None:
    keeping = h.keep("k", A)
    assert (len(keeping.blocks), keeping.num_cached) == (3, 1)
    assert len(only(h.kept("k"), Cached).stored) == 2
    assert h.core.load(0.0).free_blocks == 24, "cached, and held by nobody"
    turn = [*h.record("a").spec.tokens, *h.record("a").output, 5, 5]
    effects = h.add(spec("b", turn))
    assert only(effects, Admitted).have_blocks == 3
    assert only(effects, Launch).job.num_loaded == 3 * SIZE
    h.finish(("b", 1))


def test_what_was_not_saved_is_not_found_and_its_blocks_return(h: ServedHarness) -> None:
    assert len(h.keep("k", A).blocks) == 3
    assert h.core.load(0.0).free_blocks == 21
    assert none_of(h.kept("k", is_saved=False), Cached)
    assert h.core.load(0.0).free_blocks == 24
    assert len(h.core.cached_hashes()) == 1
    assert h.send(Kept(name="k", is_saved=True)) == [], "it is over"


def test_nothing_is_kept_twice(h: ServedHarness) -> None:
    h.keep("k", A)
    h.kept("k")
    effects_before = h.core.cached_hashes()
    assert h.keep("again", A).blocks == []
    assert h.core.cached_hashes() == effects_before


def test_two_that_keep_the_same_share_what_the_first_has_saved(h: ServedHarness) -> None:
    first, second = h.keep("one", A), h.keep("two", A)
    assert first.blocks[0] == second.blocks[0]
    assert not set(first.blocks[1:]) & set(second.blocks[1:])
    h.kept("one")
    h.kept("two")
    assert len(h.core.cached_hashes()) == 3
    assert h.core.load(0.0).free_blocks == 24


@pytest.mark.parametrize(("num_blocks", "taken"), [(15, 0), (16, 2), (24, 2)])
def test_an_answer_that_is_much_of_the_arena_is_left_out(num_blocks: int, taken: int) -> None:
    h = ServedHarness(served_config(num_blocks=num_blocks))
    h.add(spec("a", [1, 2, 3, 4, 5, 6, 1]))
    h.finish(A)
    assert max(0, len(h.keep("k", A).blocks) - 1) == taken


def test_requests_that_run_keep_their_room() -> None:
    h = ServedHarness(served_config(num_blocks=16))
    h.add(spec("a", [1, 2, 3, 4, 5, 6, 1]))
    h.finish(A)
    h.add(spec("big", [5] * 45))  # 11 of 16 blocks: beside the cached one, 4 are left, 2 of them for who comes
    h.add(spec("more", [2] * 5))
    assert h.keep("k", A).blocks == []
    h.finish(("more", 1))
    effects = h.keep("k", A)
    assert len(effects.blocks) == 3
    assert not any(isinstance(effect, HandsChanged) for effect in h.kept("k"))


def test_nothing_is_kept_while_a_prompt_waits(h: ServedHarness) -> None:
    for token, num_blocks in ((3, 10), (4, 8), (5, 10)):
        h.add(spec(f"p{token}", [token] * (num_blocks * SIZE + 1), work=Work.PREFILL))
    assert h.core.num_waiting == 1
    assert h.keep("k", A).blocks == []
