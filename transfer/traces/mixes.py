"""How large requests are: named mixes of prompt and output lengths, drawn from quantiles."""

from __future__ import annotations

import bisect
import random
from typing import NamedTuple

SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


class Mix(NamedTuple):
    """For each of SHARES, the most prompt and output tokens of that share of requests; independent of each other."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return at_share(self.prompt, rng.random()), at_share(self.output, rng.random())


MIXES = {
    "conversation": Mix(
        prompt=(2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2735, 4083, 4142, 14050),
        output=(7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 1000),
    ),
    "code": Mix(
        prompt=(3, 60, 180, 330, 640, 930, 1210, 1500, 1850, 2350, 3150, 4700, 6200, 7200, 7437),
        output=(1, 3, 5, 6, 8, 10, 11, 13, 15, 19, 26, 48, 90, 330, 1200),
    ),
    "summarise": Mix(
        prompt=(800, 1500, 2500, 3300, 4400, 5400, 6400, 7300, 8300, 9500, 11200, 14300, 17500, 24000, 40000),
        output=(20, 60, 100, 120, 150, 170, 190, 210, 230, 255, 290, 350, 420, 600, 1200),
    ),
    "reasoning": Mix(
        prompt=(20, 45, 70, 90, 120, 150, 180, 220, 270, 340, 470, 800, 1400, 3500, 8000),
        output=(50, 200, 450, 700, 1200, 1700, 2200, 2800, 3500, 4500, 6000, 9000, 12500, 20000, 32000),
    ),
    "agent": Mix(
        prompt=(20, 40, 80, 120, 220, 350, 550, 850, 1300, 2050, 3500, 6900, 11500, 28000, 50000),
        output=(1, 8, 18, 25, 37, 50, 68, 90, 120, 165, 235, 390, 600, 1150, 3500),
    ),
    "turns": Mix(
        prompt=(1, 10, 30, 100, 400, 850, 1800, 3100, 4700, 6900, 10200, 16200, 24000, 53000, 110000),
        output=(1, 3, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 1115, 2000),
    ),
}
"""conversation: quantiles of the Azure LLM inference trace of 2023, conversations. code: the medians (1,500 and 13) and
means (2,048 and 28) reported of its code part (Splitwise, ISCA 2024). summarise: means as of arXiv summaries in
Mooncake's evaluation (8,088 and 229): heavy on prefill. reasoning: short questions, answers of thousands of tokens:
heavy on decode; ours. agent, turns: what one turn of a session adds (sessions.py), calibrated so that whole prompts,
answers and shared prefixes are as in Mooncake's tool and agent, and conversation, traces (FAST'25)."""


def at_share(quantiles: tuple[int, ...], share: float) -> int:
    """Tokens at a share, linear between the known quantiles."""
    high = max(1, bisect.bisect_left(SHARES, share))
    low = high - 1
    within = (share - SHARES[low]) / (SHARES[high] - SHARES[low])
    return round(quantiles[low] + (quantiles[high] - quantiles[low]) * within)


def mean_tokens(quantiles: tuple[int, ...]) -> float:
    """Of lengths drawn by at_share."""
    pairs = zip(SHARES, SHARES[1:], quantiles, quantiles[1:], strict=False)
    return sum((high - low) * (least + most) / 2 for low, high, least, most in pairs)
