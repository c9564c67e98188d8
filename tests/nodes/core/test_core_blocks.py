"""Block tables: who holds a block, what can be found again, and which ids a table gets."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.core.blocks import BlockKey, BlockPool, BlockTable
from nodes.core.runs import FreeRuns
from transfer.errors import IllegalTransition, InvalidValue
from transfer.terms import pack_tokens


def key(*tokens: int, parent: bytes = b"") -> BlockKey:
    packed = pack_tokens(list(tokens))
    return BlockKey(hashlib.sha256(parent + packed).digest(), packed)


def table_of(pool: BlockPool, count: int, room: int = 0) -> BlockTable:
    table = BlockTable()
    assert pool.extend(table, count, room)
    return table


def test_a_table_gets_one_contiguous_run_and_grows_behind_its_last_block() -> None:
    pool = BlockPool(64)
    table = table_of(pool, 5)
    assert table.blocks == list(range(table.blocks[0], table.blocks[0] + 5))
    assert pool.extend(table, 3)
    assert table.blocks == list(range(table.blocks[0], table.blocks[0] + 8))


def test_a_table_gets_the_shortest_run_that_holds_it() -> None:
    pool = BlockPool(20)
    first, gap, last = table_of(pool, 4), table_of(pool, 2), table_of(pool, 4)
    pool.release(gap)  # free: 4..5 and 10..19
    assert table_of(pool, 3).blocks == [10, 11, 12]
    assert table_of(pool, 2).blocks == [4, 5]
    assert first.blocks + last.blocks == [0, 1, 2, 3, 6, 7, 8, 9]


def test_growing_tables_keep_out_of_each_others_way() -> None:
    pool = BlockPool(64)
    tables = [table_of(pool, 2) for _ in range(4)]  # side by side: none but the last can grow in place
    for _ in range(6):
        for table in tables:
            assert pool.extend(table, 1)
    for table in tables:
        breaks = sum(after != before + 1 for before, after in zip(table.blocks, table.blocks[1:], strict=False))
        assert breaks <= 2, table.blocks


def test_tables_that_grow_into_a_full_cache_still_get_runs() -> None:
    pool = BlockPool(1024)
    filler = table_of(pool, 1024 - 8)
    for index, block in enumerate(filler.blocks):
        pool.commit(block, key(index))
    tables = [table_of(pool, 1) for _ in range(8)]
    pool.release(filler)
    for _ in range(20):
        for table in tables:
            assert pool.extend(table, 1, room=20)
    for table in tables:  # 20 breaks each when blocks are given up one by one
        breaks = sum(after != before + 1 for before, after in zip(table.blocks, table.blocks[1:], strict=False))
        assert breaks <= 7, table.blocks
    assert pool.num_cached >= 1024 - 8 - 160 - 32


def test_without_room_nothing_is_taken() -> None:
    pool = BlockPool(4)
    table = table_of(pool, 3)
    assert not pool.extend(table, 2)
    assert (len(table.blocks), pool.num_free, pool.check([table])) == (3, 1, 0)


def test_release_is_idempotent_and_a_negative_count_names_the_history() -> None:
    pool = BlockPool(4)
    table = table_of(pool, 1)
    copy = BlockTable()
    copy.blocks = list(table.blocks)
    assert (pool.release(table), pool.release(table)) == (1, 0)
    with pytest.raises(IllegalTransition, match=r"block 0.*release.*take \(1 references\) -> release \(0 references\)"):
        pool.release(copy)


def test_a_released_block_is_found_again_until_its_memory_is_needed() -> None:
    pool = BlockPool(2)
    table = table_of(pool, 1)
    pool.commit(table.blocks[0], key(1, 2))
    pool.release(table)
    assert (pool.num_free, pool.num_cached) == (2, 1)
    assert pool.match([key(1, 2)]) == [0]
    pool.drain()
    other = table_of(pool, 2)
    assert pool.match([key(1, 2)]) == []
    changes = pool.drain()
    assert changes.removed == (key(1, 2).digest,)
    assert sorted(changes.taken) == [0, 1] == sorted(other.blocks)


def test_the_least_recently_used_goes_first_and_a_prefix_outlives_its_tail() -> None:
    pool = BlockPool(4)
    old, new = table_of(pool, 2), table_of(pool, 2)
    head = key(1)
    keys = [head, key(2, parent=head.digest), key(8), key(9)]
    for block, one in zip(old.blocks + new.blocks, keys, strict=True):
        pool.commit(block, one)
    pool.release(old)
    pool.release(new)
    user = BlockTable()
    pool.share(user, pool.match(keys[:1]))
    pool.release(user)  # the head of `old` was used last
    order = []
    for _ in range(4):
        table_of(pool, 1)
        order += pool.drain().removed
    assert order == [keys[1].digest, keys[3].digest, keys[2].digest, keys[0].digest]


def test_a_match_needs_equal_tokens_not_only_an_equal_hash() -> None:
    pool = BlockPool(2)
    table = table_of(pool, 1)
    pool.commit(table.blocks[0], key(1, 2))
    forged = BlockKey(key(1, 2).digest, pack_tokens([3, 4]))
    assert pool.match([forged]) == []
    assert pool.match([key(1, 2)]) == table.blocks


def test_the_second_commit_of_a_key_keeps_the_first_entry() -> None:
    pool = BlockPool(2)
    first, second = table_of(pool, 1), table_of(pool, 1)
    pool.commit(first.blocks[0], key(1))
    pool.commit(second.blocks[0], key(1))
    assert pool.drain().stored == {key(1).digest: first.blocks[0]}
    assert pool.match([key(1)]) == first.blocks
    pool.release(second)
    assert (pool.num_cached, pool.check([first])) == (0, 0)


def test_shared_blocks_stay_until_the_last_table_lets_go() -> None:
    pool = BlockPool(2)
    first, second = table_of(pool, 1), BlockTable()
    pool.commit(first.blocks[0], key(1))
    pool.share(second, pool.match([key(1)]))
    pool.release(first)
    assert (pool.num_free, pool.num_referenced) == (1, 1)
    pool.release(second)
    assert pool.num_free == 2


def test_an_entry_stored_and_evicted_between_drains_is_told_as_removed() -> None:
    pool = BlockPool(1)
    for _ in range(2):  # announced once, evicted, stored again, evicted again
        table = table_of(pool, 1)
        pool.commit(table.blocks[0], key(1))
        pool.release(table)
    assert pool.drain().stored == {key(1).digest: 0}
    for tokens in (2, 1, 3):
        table = table_of(pool, 1)
        pool.commit(table.blocks[0], key(tokens))
        pool.release(table)
    changes = pool.drain()
    assert changes.stored == {key(3).digest: 0}
    assert key(1).digest in changes.removed


def test_without_prefix_cache_nothing_is_kept() -> None:
    pool = BlockPool(1, prefix_cache=False)
    table = table_of(pool, 1)
    pool.commit(table.blocks[0], key(1))
    pool.release(table)
    assert (pool.match([key(1)]), pool.num_cached, pool.has_changes) == ([], 0, True)


def test_check_counts_leaks_and_refuses_contradictions() -> None:
    pool = BlockPool(4)
    table = table_of(pool, 2)
    assert pool.check([table]) == 0
    assert pool.check([]) == 2
    with pytest.raises(IllegalTransition, match="check"):
        pool.check([table, table])


def test_an_arena_without_blocks_is_refused() -> None:
    with pytest.raises(InvalidValue, match="at least one block"):
        BlockPool(0)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=60), st.integers(1, 40))
def test_free_runs_hand_out_each_id_once_and_join_again(moves: list[tuple[int, bool]], num_blocks: int) -> None:
    runs = FreeRuns(num_blocks)
    held: list[list[int]] = []
    for count, grow in moves:
        if count <= runs.total:
            after = held[-1][-1] if grow and held else None
            taken = runs.take(count, after=after)
            if after is not None and after + 1 in {*taken, *runs.blocks()}:
                assert taken[0] == after + 1
            held.append(taken)
        elif held:
            for block in held.pop(0):
                runs.add(block)
        everything = sorted([*runs.blocks(), *(block for one in held for block in one)])
        assert everything == list(range(num_blocks))
    for block in [block for one in held for block in one]:
        runs.add(block)
    assert runs.take(num_blocks) == list(range(num_blocks))
