"""Draws one token per row of logits: penalties, bans, temperature, top-k, top-p, min-p, and logprobs.

The random number of output token i depends on (seed, i) alone, so that a request which resumes on another
instance continues the same text. Order: penalties, bans, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter

import torch

from nodes.engines.engine import Sampled, Sampling
from transfer.errors import EngineFailed
from transfer.terms import SamplingParams, TokenLogprob

_SHORT_LIST = 256
"""Candidates sorted at first. Only where top-p reaches beyond them is the whole vocabulary sorted."""

_COLDEST = 1e-5
"""Below this temperature a draw is greedy."""


def sample(logits: torch.Tensor, samplings: list[Sampling]) -> list[Sampled]:
    """One token for each row of logits [num_rows, vocab_size] (float32; may be changed in place).

    Raises EngineFailed when a row holds a NaN: its request must not get an arbitrary token.
    """
    logprobs = _logprob_table(logits, samplings)
    for row, sampling in enumerate(samplings):
        if _is_adjusted(sampling):
            _adjust(logits[row], sampling)
    ids = logits.argmax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(logits.gather(-1, ids)).all()):  # argmax finds a NaN where there is one
        raise EngineFailed("the model produced logits that are not numbers; restart the instance and check its weights")
    tokens: list[int] = ids[:, 0].tolist()
    drawn = [row for row, sampling in enumerate(samplings) if sampling.params.temperature >= _COLDEST]
    if drawn:
        rows = logits if len(drawn) == len(samplings) else logits[drawn]
        for row, token in zip(drawn, _draw(rows, [samplings[row] for row in drawn]), strict=True):
            tokens[row] = token
    return [Sampled(token_id=token, logprob=_entry(logprobs.get(row), token)) for row, token in enumerate(tokens)]


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of output token `index` under `seed`."""
    digest = hashlib.blake2b(
        struct.pack("<QQ", seed & (2**64 - 1), index), digest_size=8, person=b"phaseplane"
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _is_adjusted(sampling: Sampling) -> bool:
    params = sampling.params
    has_penalty = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    return bool(sampling.banned) or has_penalty


def _adjust(row: torch.Tensor, sampling: Sampling) -> None:
    """Penalties and bans on one row [vocab_size], in place.

    Repetition (CTRL, arXiv 1909.05858) counts prompt and output; presence and frequency, as OpenAI defines
    them, count the output alone.
    """
    params, history = sampling.params, sampling.history
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(history)), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if sampling.num_output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(history[len(history) - sampling.num_output :])
        amounts = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        row[list(counts)] -= torch.tensor(amounts, dtype=row.dtype, device=row.device)
    if sampling.banned:
        row[list(sampling.banned)] = float("-inf")


def _draw(logits: torch.Tensor, samplings: list[Sampling]) -> list[int]:
    """Inverse-CDF draw for rows [num_rows, vocab_size] that all have a temperature above 0.

    Rows with and without truncation walk their candidates in different orders, so each kind is drawn apart:
    a row's token must not depend on its neighbours.
    """
    tokens = [0] * len(samplings)
    for is_truncated, draw in ((False, _draw_from_all), (True, _draw_from_best)):
        rows = [row for row, sampling in enumerate(samplings) if _is_truncated(sampling.params) == is_truncated]
        if rows:
            params = [samplings[row].params for row in rows]
            numbers = [uniform(samplings[row].params.seed, samplings[row].num_output) for row in rows]
            scaled = logits[rows] / _column([p.temperature for p in params], logits)
            found = draw(scaled, params, torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None])
            for row, token in zip(rows, found, strict=True):
                tokens[row] = token
    return tokens


def _is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _draw_from_all(scaled: torch.Tensor, _params: list[SamplingParams], numbers: torch.Tensor) -> list[int]:
    """Candidates in the order of their ids."""
    cumulative = torch.softmax(scaled, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    tokens: list[int] = _invert(cumulative, numbers)[:, 0].tolist()
    return tokens


def _draw_from_best(scaled: torch.Tensor, params: list[SamplingParams], numbers: torch.Tensor) -> list[int]:
    """Candidates from the most to the least probable, equal ones by id."""
    vocab_size = scaled.shape[-1]
    total = torch.logsumexp(scaled, dim=-1, keepdim=True)
    width = min(max(_SHORT_LIST, *(p.top_k + 1 for p in params)), vocab_size)
    ids, weights = _best(scaled, width, total)
    kept, is_enough = _truncate(weights, params, is_whole=width == vocab_size)
    if not is_enough:
        ids, weights = _best(scaled, vocab_size, total)
        kept, _ = _truncate(weights, params, is_whole=True)
    ranks = _invert(kept.cumsum(dim=-1, dtype=torch.float64), numbers)
    tokens: list[int] = ids.gather(-1, ranks)[:, 0].tolist()
    return tokens


def _best(scaled: torch.Tensor, width: int, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` best ids and their probabilities, in a definite order also among equals."""
    if width < scaled.shape[-1]:
        ids = scaled.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
        values, order = scaled.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        return ids.gather(-1, order), (values - total).exp()
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    return ids, (values - total).exp()


def _truncate(weights: torch.Tensor, params: list[SamplingParams], *, is_whole: bool) -> tuple[torch.Tensor, bool]:
    """Probabilities [num_rows, width], best first, with those outside min-p, top-k and top-p set to 0.

    The flag is False when some row may keep more than the `width` given. The draw renormalises.
    """
    floor = _column([p.min_p for p in params], weights) * weights[:, :1]
    ranks = torch.arange(weights.shape[-1], device=weights.device)
    limits = torch.tensor([p.top_k or 2**31 for p in params], device=weights.device)[:, None]
    kept = torch.where((weights >= floor) & (ranks < limits), weights, 0.0)
    # top-p is a share of what min-p and top-k leave: known when they end inside the list, or when they are off.
    is_closed = kept[:, -1:] == 0.0
    is_off = torch.tensor([p.top_k == 0 and p.min_p == 0.0 for p in params], device=weights.device)[:, None]
    mass = kept.sum(dim=-1, keepdim=True)
    if not is_whole:
        mass = torch.where(is_closed, mass, 1.0)
    before = kept.cumsum(dim=-1, dtype=torch.float64) - kept
    kept = torch.where(before < _column([p.top_p for p in params], weights) * mass, kept, 0.0)
    is_met = is_off & (kept[:, -1:] == 0.0)
    return kept, is_whole or bool((is_closed | is_met).all())


def _invert(cumulative: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative weight exceeds number * total: [num_rows, 1]."""
    index = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    # A number just under 1 may round up to the total: then the last entry of any weight is meant.
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(index, last)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


_Table = tuple[torch.Tensor, tuple[int, ...], tuple[float, ...]]


def _logprob_table(logits: torch.Tensor, samplings: list[Sampling]) -> dict[int, _Table]:
    """For each row that wants logprobs: all of them [vocab_size], the best ids and their values."""
    table: dict[int, _Table] = {}
    for row, sampling in enumerate(samplings):
        count = sampling.params.logprobs
        if count is None:
            continue
        values = torch.log_softmax(logits[row], dim=-1)
        best = values.topk(min(count, values.shape[0]))
        table[row] = (values, tuple(best.indices.tolist()), tuple(best.values.tolist()))
    return table


def _entry(table: _Table | None, token: int) -> TokenLogprob | None:
    if table is None:
        return None
    values, top_ids, top_logprobs = table
    return TokenLogprob(logprob=float(values[token]), top_ids=top_ids, top_logprobs=top_logprobs)
