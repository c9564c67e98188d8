"""Forty varied prompts for parity tests, from 5 to 3,000 tokens. Deterministic; made from templates here."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Prompt:
    name: str
    token_ids: list[int]


NAMES = ["Ada", "Bilal", "Chiara", "Dmitri", "Esther", "Farah", "Goran", "Hana", "Imani", "Jonas"]
PLACES = ["the harbour", "a mountain hut", "the old library", "a tram depot", "the orchard", "a field station"]
THINGS = ["a brass compass", "three letters", "an unfinished map", "a jar of seeds", "the spare key", "a broken radio"]
ACTS = ["measured", "repaired", "described", "carried home", "hid", "photographed", "counted", "drew"]
CJK = [
    "今天早上下了一场小雨，街道上很安静。",
    "老师问学生：水为什么会结冰？",
    "図書館の前で友だちを待っています。",
    "電車は十時三分に駅を出ました。",
    "우리는 강가에서 따뜻한 차를 마셨다.",
    "请把下面的句子翻译成英文。",
]
EMOJI = ["🚲", "🌧️", "🍊", "🎻", "🧭", "👩‍🔬", "🏔️", "🧵", "🐙", "🇫🇷"]

LENGTHS = [5, 7, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 190, 255, 256, 300, 420]
"""Of the prompts that stand alone; around the block size and its multiples on purpose."""
LONG = [511, 640, 900, 1300, 2048, 2500, 3000]


def build_prompts(encode: Encode) -> list[Prompt]:
    """The 40 prompts as token ids: English, code, CJK, emoji, chat, and three families that share a long prefix."""
    kinds = [english, code, cjk, emoji, chat, ledger]
    prompts = []
    for index, length in enumerate(LENGTHS + LONG):
        kind = kinds[index % len(kinds)]
        prompts.append(Prompt(f"{kind.__name__}-{length}", cut(encode, kind, 100 + index, length)))
    for family, kind, prefix_length, tails in ((0, english, 600, 4), (1, code, 1200, 3), (2, chat, 96, 2)):
        prefix = cut(encode, kind, 900 + family, prefix_length)
        for tail in range(tails):
            own = cut(encode, ledger if family else chat, 950 + 10 * family + tail, 20 + 23 * tail)
            prompts.append(Prompt(f"shared-{prefix_length}-{tail}", prefix + own))
    return prompts


def cut(encode: Encode, kind: Callable[[random.Random], str], seed: int, length: int) -> list[int]:
    """Exactly `length` tokens of text of one kind."""
    rng = random.Random(seed)
    text = kind(rng)
    while len(tokens := encode(text)) < length:
        text += kind(rng)
    return tokens[:length]


def english(rng: random.Random) -> str:
    """A paragraph about someone who does something somewhere."""
    who, other = rng.sample(NAMES, 2)
    sentences = [
        f"{who} {rng.choice(ACTS)} {rng.choice(THINGS)} near {rng.choice(PLACES)} before noon.",
        f'"We should ask {other}," said {who}, "because {rng.choice(THINGS)} was here in {rng.randint(1890, 2020)}."',
        f"It took {rng.randint(2, 60)} minutes to walk from {rng.choice(PLACES)} to {rng.choice(PLACES)}.",
        f"Nobody had {rng.choice(ACTS)} {rng.choice(THINGS)} since the winter.",
        f"The question is whether {other} would rather keep {rng.choice(THINGS)} or give it away.",
    ]
    rng.shuffle(sentences)
    return " ".join(sentences) + "\n\n"


def code(rng: random.Random) -> str:
    """A small Python function with a docstring and a call."""
    name = rng.choice(["total", "nearest", "merge", "window", "clamp", "rotate"])
    low, high = sorted(rng.sample(range(100), 2))
    return (
        f"def {name}_{low}(values: list[int], limit: int = {high}) -> int:\n"
        f'    """Return the {name} of values that are below limit."""\n'
        f"    result = 0\n    for index, value in enumerate(values):\n"
        f"        if value < limit and index % {rng.randint(2, 9)} == 0:\n            result += value\n"
        f"    return result\n\nprint({name}_{low}([{low}, {high}, {low + high}]))  # {rng.choice(NAMES)}\n\n"
    )


def cjk(rng: random.Random) -> str:
    """Chinese, Japanese and Korean sentences with a number."""
    return "".join(rng.sample(CJK, 3)) + f"{rng.randint(1, 999)}。\n"


def emoji(rng: random.Random) -> str:
    """English with emoji, among them joined and flag sequences."""
    start = f"{rng.choice(NAMES)} {rng.choice(EMOJI)} {rng.choice(ACTS)} {rng.choice(THINGS)}"
    return f"{start} {''.join(rng.sample(EMOJI, 3))}! "


def chat(rng: random.Random) -> str:
    """One turn in the model's chat format."""
    question = rng.choice(["Where is", "Who has", "Why do we need", "Describe", "How heavy is"])
    return (
        f"<|im_start|>user\n{question} {rng.choice(THINGS)} at {rng.choice(PLACES)}?<|im_end|>\n"
        f"<|im_start|>assistant\n{rng.choice(NAMES)} {rng.choice(ACTS)} it {rng.randint(2, 30)} days ago.<|im_end|>\n"
    )


def ledger(rng: random.Random) -> str:
    """Rows of a table: digits, separators and short words."""
    rows = [
        f"| {rng.randint(1, 99):02d} | {rng.choice(NAMES)} | {rng.choice(ACTS)} | {rng.uniform(0, 500):.2f} |"
        for _ in range(4)
    ]
    return "\n".join(rows) + "\n"
