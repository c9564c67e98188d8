"""Incremental text: deltas join to the whole, characters are never split, stop strings cut where they should."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from controlplane.gateway.assembler import Assembler
from controlplane.gateway.chat_template import ChatTemplate
from controlplane.gateway.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from controlplane.gateway.tokenizer import BYTE_EOS, ByteTokenizer, HfTokenizer
from transfer.errors import ConfigError, InvalidValue
from transfer.terms import FinishReason

TEXTS = (
    "The quick brown fox jumps over the lazy dog. " * 3,
    "中文测试，你好世界。日本語のテキスト、한국어 문장.",
    "😀👨‍👩‍👧‍👦🇩🇪 naïve café — “quotes” …",
    "def f(x):\n    return x ** 2\n\n\tprint(f(3))  # done",
)
TEXT = st.one_of(st.sampled_from(TEXTS), st.text(alphabet=st.characters(codec="utf-8"), max_size=80))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small byte-level BPE, special tokens and a chat template."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    (directory / "config.json").write_text(f'{{"vocab_size": {size + 8}, "max_position_embeddings": 64}}')
    (directory / "phaseplane.json").write_text('{"name": "tiny", "revision": "r"}')
    (directory / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}{% for m in messages %}'
        '{{ m.role }}:{{ m.content }}|{% endfor %}{% if add_generation_prompt %}a:{% endif %}"}'
    )
    return directory


def joined(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join(detokenizer.add(token) for token in ids) + detokenizer.flush()


@given(st.lists(st.integers(0, 256), max_size=60))
def test_byte_deltas_join_to_the_decoding_of_any_ids(ids: list[int]) -> None:
    tokenizer = ByteTokenizer(100)
    assert joined(tokenizer.detokenizer(), ids) == tokenizer.decode(ids)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 420), max_size=60))
def test_hf_deltas_join_to_the_decoding_of_any_ids(model: Path, ids: list[int]) -> None:
    tokenizer = HfTokenizer(model)
    assert joined(tokenizer.detokenizer(), ids) == tokenizer.decode(ids)


@settings(deadline=None)
@given(text=TEXT)
def test_text_survives_both_detokenizers_and_no_delta_is_broken(model: Path, text: str) -> None:
    tokenizer = HfTokenizer(model)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for detokenizer in (tokenizer.detokenizer(), WindowDetokenizer(tokenizer.decode)):
        deltas = [*(detokenizer.add(token) for token in ids), detokenizer.flush()]
        assert "".join(deltas) == text
        assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


def test_the_window_detokenizer_keeps_the_spaces_of_a_sentencepiece_decoder() -> None:
    words = ["▁Hello", "▁world", "!", "▁again"]
    metaspace = decoders.Metaspace()

    def decode(ids: list[int]) -> str:
        return metaspace.decode([words[token] for token in ids])

    assert joined(WindowDetokenizer(decode), [0, 1, 2, 3, 3]) == "Hello world! again again"


def test_the_window_detokenizer_does_not_grow_with_the_output() -> None:
    lengths = list[int]()

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return "x" * len(ids)

    joined(WindowDetokenizer(decode), [0] * 500)
    assert max(lengths) <= 16


def test_broken_bytes_are_released_instead_of_held_for_ever() -> None:
    detokenizer = WindowDetokenizer(lambda ids: "\ufffd" * len(ids))
    assert len("".join(detokenizer.add(0) for _ in range(40))) >= 24


def test_token_bytes_and_special_tokens(model: Path) -> None:
    tokenizer = HfTokenizer(model)
    assert tokenizer.token_bytes(0) == b"<s>"
    assert tokenizer.token_bytes(10_000) == b""
    assert tokenizer.vocab_size >= 400
    ids = tokenizer.encode("日", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == "日".encode()
    assert tokenizer.decode([0, *ids], skip_special_tokens=False) == "<s>日"


def test_chat_template_of_a_model_directory(model: Path) -> None:
    template = HfTokenizer(model).template
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>user:hi|a:"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[3].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_an_invalid_value(source: str) -> None:
    with pytest.raises(InvalidValue, match="chat template refuses"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


def test_template_helpers_and_errors() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }} {{ messages | tojson }} {{ thinking }}", {})
    text = template.render([{"role": "user", "content": "é<"}], {"thinking": True})
    assert text.startswith("2")
    assert 'é<"' in text
    assert text.endswith("True")
    with pytest.raises(InvalidValue, match="may not set messages"):
        template.render([], {"messages": []})
    with pytest.raises(ConfigError, match="does not parse"):
        ChatTemplate("{% for %}", {})


def feed(assembler: Assembler, text: bytes, sizes: list[int], finish: FinishReason | None) -> tuple[str, int, str]:
    """Text fed in items of the given sizes: (text, tokens used, finish)."""
    shown, used, at = "", 0, 0
    while at < len(text) and not assembler.done:
        size = sizes.pop(0) if sizes else len(text)
        part = text[at : at + size]
        at += size
        last = at >= len(text)
        piece, count = assembler.feed(list(part), finish if last else None)
        used += count
        shown += piece.text if piece else ""
        if piece and piece.finish:
            return shown, used, piece.finish.value
    return shown, used, ""


@given(
    text=st.text(alphabet="abc中", min_size=1, max_size=30),
    stops=st.lists(st.text(alphabet="abc中", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(1, 5), max_size=40),
)
def test_stop_strings_cut_the_text_however_it_is_split(text: str, stops: list[str], sizes: list[int]) -> None:
    raw = text.encode()
    assembler = Assembler(ByteDetokenizer([bytes([value]) for value in range(256)]), stops)
    shown, used, finish = feed(assembler, raw, list(sizes), FinishReason.LENGTH)
    # Reference: a character at a time, the first prefix of the text that contains a stop string.
    for end in range(1, len(text) + 1):
        hits = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if hits:
            assert (shown, used, finish) == (text[: min(hits)], len(text[:end].encode()), "stop")
            return
    assert (shown, used, finish) == (text, len(raw), "length")


@pytest.mark.parametrize(
    ("min_tokens", "include", "expected", "used"),
    [(0, False, "ab", 5), (0, True, "abEND", 5), (5, False, "abENDcd", 10), (5, True, "abENDcdEND", 10)],
)
def test_min_tokens_and_including_the_stop_string(min_tokens: int, include: bool, expected: str, used: int) -> None:
    assembler = Assembler(ByteTokenizer(9).detokenizer(), ["END"], min_tokens, include)
    assert feed(assembler, b"abENDcdEND", [1] * 20, FinishReason.LENGTH) == (expected, used, "stop")


def test_a_stop_token_is_counted_and_not_shown() -> None:
    assembler = Assembler(ByteTokenizer(9).detokenizer())
    piece, used = assembler.feed([104, 105, 33], FinishReason.STOP)
    assert piece is not None
    assert (piece.text, piece.token_ids, used, assembler.done) == ("hi", [104, 105, 33], 3, True)


def test_held_back_text_comes_out_at_the_end_and_incomplete_characters_as_replacement() -> None:
    assembler = Assembler(ByteTokenizer(9).detokenizer(), ["STOP"])
    first, _ = assembler.feed(list(b"xST"), None)
    second, _ = assembler.feed([0xE4, BYTE_EOS], FinishReason.STOP)
    assert first is not None
    assert second is not None
    assert (first.text, second.text) == ("x", "ST\ufffd")
    assert second.token_ids == [0xE4, BYTE_EOS]


def test_tokens_held_back_travel_with_the_next_piece() -> None:
    assembler = Assembler(ByteTokenizer(9).detokenizer())
    assert assembler.feed([0xE4], None) == (None, 1)
    assert assembler.feed([0xB8], None) == (None, 1)
    piece, _ = assembler.feed([0xAD], None)
    assert piece is not None
    assert (piece.text, piece.token_ids) == ("中", [0xE4, 0xB8, 0xAD])
