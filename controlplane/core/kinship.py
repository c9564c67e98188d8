"""Whether a newcomer goes with the instances that serve its model: who exchanges KV must agree in all of it, an engine
that keeps KV to itself only in what requests are made of. Values only; fleet.py asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from transfer.terms import KvLayout, ModelIdentity
from transfer.wire.messages import Hello


def stranger(hello: Hello, model: ModelIdentity, layout: KvLayout, others: Sequence[Hello]) -> str | None:
    """Why it cannot serve `model` beside those `others`, in a sentence; None when it can."""
    sharing = [one for one in others if one.shares_kv]
    if hello.shares_kv and sharing:
        return _no_twin(hello, model, layout, sharing)
    for one in others[:1]:
        assert one.model is not None
        assert one.layout is not None
        for field in ("tokenizer", "vocab_size"):
            if getattr(model, field) != getattr(one.model, field):
                return _another(hello, model, field)
        if layout.block_size != one.layout.block_size:
            return (f"{hello.instance_id} counts its room in blocks of {layout.block_size} tokens and the fleet's "
                    f"{model.name} in blocks of {one.layout.block_size}; start it with --block-size "
                    f"{one.layout.block_size}")  # fmt: skip
    return None


def difference(mine: ModelIdentity | KvLayout, other: ModelIdentity | KvLayout) -> str:
    """Names of the fields that differ; empty when equal."""
    return ", ".join(name for name in mine.__struct_fields__ if getattr(mine, name) != getattr(other, name))


def _no_twin(hello: Hello, model: ModelIdentity, layout: KvLayout, sharing: Sequence[Hello]) -> str | None:
    """Of two that may exchange KV."""
    first = sharing[0]
    assert first.model is not None
    assert first.layout is not None
    if fields := difference(model, first.model):
        return _another(hello, model, fields)
    if fields := difference(layout, first.layout):
        return (f"{hello.instance_id} keeps KV of {model.name} in another layout: {fields} differs from "
                f"the fleet's; start it with the same KV settings")  # fmt: skip
    for one in sharing:
        if one.engine == hello.engine and one.engine_version != hello.engine_version:
            return (f"{hello.instance_id} runs {hello.engine} {hello.engine_version or 'of no known version'} and "
                    f"{one.instance_id} runs {one.engine_version or 'one of no known version'}; what one keeps as KV "
                    "the other may read as something else, so run the same version on both")  # fmt: skip
    return None


def _another(hello: Hello, model: ModelIdentity, fields: str) -> str:
    return (f"{hello.instance_id} serves another {model.name}: its {fields} differs from the "
            f"fleet's; load the same model everywhere, or serve it under another name")  # fmt: skip
