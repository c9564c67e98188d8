"""How a server can go on with a request that has penalties: found out once, by two tokens that it is asked for.

OpenAI's presence and frequency penalties count output alone, and output drawn elsewhere is prompt to the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

from nodes.engines.openai.text import Text
from transfer.terms import TokenIds

REPEATED, OTHER = " the", " of"
TIMES = 64
"""llama.cpp counts so many tokens back."""
LIKED, FORCED = 50, 100
"""Biases: above what logits differ by, and below what TIMES repetitions cost at the highest frequency penalty, 2."""


class Carry(StrEnum):
    BIAS = "bias"
    """Penalties of earlier output are put on by logit_bias."""
    COUNTED = "counted"
    """The server counts prompts as well, and so that output."""
    LOST = "lost"


async def learned_carry(text: Text, drawn: Callable[[TokenIds, dict[str, Any]], Awaitable[int | None]]) -> Carry:
    """drawn: the likeliest token after a prompt, with more in the request; None where the server refuses that."""
    repeated, other = text.encode(REPEATED)[-1], text.encode(OTHER)[-1]
    prompt = [repeated] * TIMES
    if await drawn(prompt, {"logit_bias": {str(other): FORCED}}) != other:
        return Carry.LOST
    kept = await drawn(prompt, {"logit_bias": {str(repeated): LIKED}, "frequency_penalty": 2.0})
    return Carry.BIAS if kept == repeated else Carry.COUNTED
