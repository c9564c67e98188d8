"""Two models behind one gateway: each with its own tokenizer and context, and nodes held to the one they serve."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from core_kit import MODEL, hello
from gateway_calls import post
from gateway_fakes import front, items

from controlplane.config import Config, Model, load_config
from controlplane.model import Served, load_model, why_refused
from transfer.errors import ConfigError
from transfer.terms import Role

TWO = Config(
    model=Model(name="big", engine="emulated", max_context=4096),
    models={"little": Model(name="small", engine="emulated", max_context=64)},
)


async def test_each_model_is_asked_by_its_name_and_keeps_to_its_own_context() -> None:
    async with front(TWO) as f:
        f.reply(lambda spec: items(spec.request_id, "a"))
        for name, node in (("big", "big"), ("little", "small")):
            for path, body in (
                ("/v1/completions", {"prompt": "hi"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ):
                status, answer, _ = await post(f, path, {"model": name, **body})
                assert (status, answer["model"]) == (200, name)
                assert list(f.core.specs.values())[-1].model == node
        long = {"prompt": "x" * 100}
        assert (await post(f, "/v1/completions", {"model": "big", **long}))[0] == 200
        status, answer, _ = await post(f, "/v1/completions", {"model": "little", **long})
        assert status == 400
        assert "context is 64 tokens" in answer["error"]["message"]
        status, answer, _ = await post(f, "/v1/completions", {"model": "other", **long})
        assert status == 404
        assert "serves 'big' and 'little'" in answer["error"]["message"]


async def test_models_are_listed_with_what_is_their_own() -> None:
    async with front(TWO) as f:
        listed = (await (await f.client.get("/v1/models")).json())["data"]
        assert [(one["id"], one["root"], one["max_model_len"]) for one in listed] == [
            ("big", "big", 4096), ("little", "small", 64),
        ]  # fmt: skip
        assert (await (await f.client.get("/v1/models/little")).json())["max_model_len"] == 64
        status, answer, _ = await post(f, "/tokenize", {"model": "little", "prompt": "hi"})
        assert (status, answer["max_model_len"]) == (200, 64)


def test_a_node_is_held_to_the_model_it_serves() -> None:
    models = [load_model(model)[0] for model in TWO.served.values()]
    big = msgspec.structs.replace(MODEL, name="big", vocab_size=257, max_context=4096)
    small = msgspec.structs.replace(big, name="small", max_context=64)
    assert why_refused(models, hello("n", Role.DECODE, model=big)) is None
    assert why_refused(models, hello("n", Role.DECODE, model=small)) is None
    assert why_refused(models, hello("k", Role.KV_POOL)) is None
    short = msgspec.structs.replace(big, max_context=64)
    assert "context of 64 tokens" in str(why_refused(models, hello("n", Role.DECODE, model=short)))
    assert "this control plane serves big and small" in str(why_refused(models, hello("n", Role.DECODE)))


def test_one_that_keeps_kv_to_itself_may_have_other_weights_and_a_shorter_context() -> None:
    served = Served(name="m", max_context=1000, identity=MODEL)
    other = msgspec.structs.replace(MODEL, revision="as served by http://127.0.0.1:1", max_context=10)
    assert why_refused([served], hello("s", Role.MIXED, model=other, shares_kv=False)) is None
    assert "context of 10" in str(why_refused([served], hello("s", Role.MIXED, model=other)))
    longer = msgspec.structs.replace(other, max_context=1000)
    assert "its revision differs" in str(why_refused([served], hello("s", Role.MIXED, model=longer)))
    alien = msgspec.structs.replace(other, tokenizer="t2")
    assert "its tokenizer differs" in str(why_refused([served], hello("s", Role.MIXED, model=alien, shares_kv=False)))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ('[models.big]\nname = "x"', "that no other model has"), ('[models."a b"]\nname = "x"', "must have a name"),
        ('[models.x]\nname = "y"\nserved_name = "z"', "leave served_name out"),
        ('[models.x]\nname = "/models/big"', "are the same"), ('[models.x]\nmax_context = 0', "must be above 0"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_told_apart_are_refused(more: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "phaseplane.toml"
    file.write_text(f'[model]\nname = "big"\n{more}\n')
    with pytest.raises(ConfigError, match=sentence):
        load_config(file, {}, {})


def test_models_are_read_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "phaseplane.toml"
    file.write_text('[model]\nname = "big"\n[models.little]\nname = "small"\nmax_context = 64\n')
    assert [(name, one.name) for name, one in load_config(file, {}, {}).served.items()] == [
        ("big", "big"), ("little", "small"),
    ]  # fmt: skip
