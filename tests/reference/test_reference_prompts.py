"""The stored reference is complete, varied and made from the prompts that the generator makes."""

from __future__ import annotations

from reference.make_reference import NUM_OUTPUT_TOKENS, REFERENCE_FILE, load_reference
from reference.prompts import build_prompts


def test_forty_prompts_from_5_to_3000_tokens_with_margins() -> None:
    entries = load_reference()["prompts"]
    lengths = [len(entry["prompt"]) for entry in entries]
    assert len(entries) == 40
    assert (min(lengths), max(lengths)) == (5, 3000)
    assert all(len(entry["output"]) == len(entry["margins"]) == NUM_OUTPUT_TOKENS for entry in entries)
    assert all(margin >= 0 for entry in entries for margin in entry["margins"])
    assert REFERENCE_FILE.stat().st_size < 1_000_000


def test_prompts_are_deterministic_and_some_share_long_prefixes() -> None:
    def encode(text: str) -> list[int]:
        return list(text.encode())

    prompts = build_prompts(encode)
    assert prompts == build_prompts(encode)
    shared = [prompt.token_ids for prompt in prompts if prompt.name.startswith("shared-600")]
    assert len(shared) == 4
    assert len({tuple(ids[:600]) for ids in shared}) == 1
    assert len({tuple(ids) for ids in shared}) == 4
