"""Block hashes: a chain over whole blocks, the same in every process, whatever way it was computed."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from transfer.errors import InvalidValue
from transfer.kv.block import HashChain, block_hashes
from transfer.terms import KvLayout, ModelIdentity, kv_fingerprint, pack_tokens

ROOT = bytes(32)
tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def test_it_is_the_chain_it_says():
    tokens = [1, 2, 3, 4, 5, 6, 7]
    first = hashlib.sha256(ROOT + pack_tokens([1, 2, 3])).digest()
    second = hashlib.sha256(first + pack_tokens([4, 5, 6])).digest()
    assert block_hashes(tokens, 3, ROOT) == [first, second]


@given(tokens_lists, st.integers(1, 9), st.integers(0, 12))
def test_known_hashes_are_kept_and_change_nothing(tokens: list[int], block_size: int, num_known: int):
    whole = block_hashes(tokens, block_size, ROOT)
    assert len(whole) == len(tokens) // block_size
    assert block_hashes(tokens, block_size, ROOT, known=whole[:num_known]) == whole


def test_known_hashes_are_not_computed_again():
    made_up = [b"k" * 32]
    tokens = list(range(6))
    hashes = block_hashes(tokens, 3, ROOT, known=made_up)
    assert hashes == [made_up[0], hashlib.sha256(made_up[0] + pack_tokens([3, 4, 5])).digest()]
    assert block_hashes([0, 1], 3, ROOT, known=made_up) == []


@given(tokens_lists, st.integers(1, 9), st.lists(st.integers(1, 7), max_size=30))
def test_a_growing_chain_equals_the_whole(tokens: list[int], block_size: int, steps: list[int]):
    chain = HashChain(block_size, ROOT)
    rest, filled = tokens, []
    for step in steps:
        filled += chain.extend(rest[:step])
        rest = rest[step:]
    filled += chain.extend(rest)
    assert chain.hashes == filled == block_hashes(tokens, block_size, ROOT)
    assert chain.num_tokens == len(tokens)


@given(tokens_lists.filter(lambda tokens: len(tokens) >= 4), st.data())
def test_any_change_changes_this_block_and_all_after(tokens: list[int], data: st.DataObject):
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    other = list(tokens)
    other[at] ^= 1
    before, after = block_hashes(tokens, 4, ROOT), block_hashes(other, 4, ROOT)
    assert before[: at // 4] == after[: at // 4]
    assert all(a != b for a, b in zip(before[at // 4 :], after[at // 4 :], strict=True))


def test_the_root_separates_models_and_tenants():
    """Whatever changes the bytes of KV, or whose they are, changes every key."""
    model = ModelIdentity(name="m", revision="a" * 64, tokenizer="b" * 64, vocab_size=10, max_context=10)
    layout = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32", rope="theta=1")
    roots = [
        kv_fingerprint(model, layout),
        kv_fingerprint(model, layout, salt="tenant"),
        kv_fingerprint(model, layout, salt="another"),
        kv_fingerprint(model, layout, codec="q8"),
        *(kv_fingerprint(replace(model, **{field: "c" * 64}), layout) for field in ("revision", "tokenizer")),
        kv_fingerprint(model, replace(layout, dtype="float16")),
        kv_fingerprint(model, replace(layout, rope="theta=2")),
        *(
            kv_fingerprint(model, replace(layout, **{field: 8}))
            for field in ("num_layers", "num_kv_heads", "head_dim", "block_size")
        ),
    ]
    assert len({block_hashes([1, 2, 3, 4], 4, root)[0] for root in roots}) == len(roots) == 12


def test_it_is_the_same_in_another_process():
    code = (
        "from transfer.kv.block import block_hashes;"
        "print(''.join(h.hex() for h in block_hashes(list(range(64)), 16, bytes(32))))"
    )
    for seed in ("1", "2"):
        output = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": seed},
            cwd=".",
        ).stdout.strip()  # fmt: skip
        assert output == "".join(name.hex() for name in block_hashes(list(range(64)), 16, ROOT))


@pytest.mark.parametrize(("size", "root", "words"), [(0, ROOT, "block_size 0"), (4, b"short", "32 bytes")])
def test_nonsense_is_refused(size: int, root: bytes, words: str):
    with pytest.raises(InvalidValue, match=words):
        block_hashes([1], size, root)
    with pytest.raises(InvalidValue):
        HashChain(4, ROOT).extend([-1])
