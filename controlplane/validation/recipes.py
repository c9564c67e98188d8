"""What the measured rows leave out of their deployments, from the public recipes of the sweep they come from.

recipes.csv holds, for the configurations in the rows, what SemiAnalysis InferenceX (Apache-2.0) publishes as its
sweep's settings: engines and GPUs of each phase, data-parallel attention, and draft tokens of speculative decoding.
Settings only, no measurement.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from controlplane.validation.rows import GPUS_PER_NODE, Engine, MeasuredRow

FILE = Path(__file__).parent / "recipes.csv"
TIE = 0.15
FAR_DAYS = 60
Key = tuple[str, str, str, str, bool, int, int, int]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One published setting. first, last: the days it stood in the sweep."""

    image: str
    first: date
    last: date
    draft_tokens: int
    prefill: Engine | None
    decode: Engine
    per_worker: bool = False


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a row was measured on, as far as that can be known.

    clients: in closed loop over all engines. draft_tokens: of speculative decoding, 0 for none. certain: False where
    recipes with and without draft tokens fit the row equally well; it is then taken to be without.
    """

    prefill: Engine | None
    decode: Engine
    clients: int
    draft_tokens: int = 0
    certain: bool = True


class Recipes:
    """Looks up the recipe that fits a row best."""

    def __init__(self, lines: Iterable[Mapping[str, str]]) -> None:
        self._by_key: dict[Key, list[Recipe]] = defaultdict(list)
        for line in lines:
            self._add(line)

    @classmethod
    def read(cls, file: Path = FILE) -> Recipes:
        with file.open(encoding="utf-8", newline="") as stream:
            return cls(csv.DictReader(stream))

    def deployment(self, row: MeasuredRow) -> Deployment:
        """By the best recipe, else by the row alone."""
        ranked = sorted(
            ((_fit(row, recipe), recipe) for recipe in self._candidates(row)), key=lambda one: one[0], reverse=True
        )
        if not ranked or row.concurrency is None:
            return _alone(row)
        best = [recipe for score, recipe in ranked if score > ranked[0][0] - TIE]
        plain = [recipe for recipe in best if not recipe.draft_tokens]
        certain = len(plain) in (0, len(best))
        recipe = best[0] if certain else plain[0]
        prefill, decode = recipe.prefill, recipe.decode
        if row.prefill is None and prefill is None:
            decode = _merged(row.decode, decode)
        elif row.workers_known and row.prefill is not None and prefill is not None:
            prefill = Engine(row.prefill.workers, prefill.gpus, prefill.dp, prefill.ep)
            decode = Engine(row.decode.workers, decode.gpus, decode.dp, decode.ep)
        return Deployment(prefill, decode, row.concurrency, recipe.draft_tokens, certain)

    def _candidates(self, row: MeasuredRow) -> Sequence[Recipe]:
        if row.concurrency is None:
            return ()
        spans = row.disaggregated or (row.decode.gpus > GPUS_PER_NODE and not row.decode.dp)
        return self._by_key.get(
            (row.model, row.gpu, row.backend, row.precision, spans, row.input_tokens, row.output_tokens,
             row.concurrency), ()
        )  # fmt: skip

    def _add(self, line: Mapping[str, str]) -> None:
        prefill = _engine(line["prefill"]) if line["prefill"] else None
        decode = _engine(line["decode"])
        for told in line["concurrency"].split("|"):
            per_worker = told.endswith("w")
            clients = int(told.rstrip("w")) * (decode.workers if per_worker else 1)
            key = (line["model"], line["gpu"], line["backend"], line["precision"], prefill is not None,
                   int(line["isl"]), int(line["osl"]), clients)  # fmt: skip
            self._by_key[key].append(
                Recipe(
                    line["image"],
                    date.fromisoformat(line["first"]),
                    date.fromisoformat(line["last"]),
                    int(line["draft"]),
                    prefill,
                    decode,
                    per_worker,
                )
            )


def _fit(row: MeasuredRow, recipe: Recipe) -> float:
    """Points for every setting in which the row and the recipe agree."""
    score = 8.0 * (row.image != "" and row.image == recipe.image) - 0.5 * recipe.per_worker
    if row.measured is not None:
        outside = max((recipe.first - row.measured).days, (row.measured - recipe.last).days, 0)
        after = abs((row.measured - recipe.first).days)
        score -= min(outside, FAR_DAYS) / 20 + min(after, FAR_DAYS) / FAR_DAYS
    prefill, decode = recipe.prefill, recipe.decode
    if prefill is None:
        score += 4.0 * (row.decode.gpus == decode.gpus) + 2.0 * (row.decode.ep == decode.ep)
        return score + 1.0 * (row.decode.dp == decode.dp)
    total = prefill.workers * prefill.gpus + decode.workers * decode.gpus
    if row.prefill is None:
        return score + 8.0 * (row.decode.gpus == total)
    if row.workers_known:
        score += 4.0 * (row.decode.workers == decode.workers) + 4.0 * (row.prefill.workers == prefill.workers)
    if row.decode.gpus == row.prefill.gpus == total:
        return score + 8.0
    if (row.prefill.gpus, row.decode.gpus) == (prefill.workers * prefill.gpus, decode.workers * decode.gpus):
        return score + 7.0
    score += 4.0 * (row.prefill.gpus == prefill.gpus) + 4.0 * (row.decode.gpus == decode.gpus)
    return score + 2.0 * (row.prefill.ep == prefill.ep)


def _merged(told: Engine, recipe: Engine) -> Engine:
    """The row's engine; what it says of data and expert parallelism counts, and what only the recipe says."""
    gpus = told.gpus if told.gpus in (1, 2, 4, 8) else recipe.gpus
    same = recipe.gpus == gpus
    return Engine(1, gpus, told.dp or (same and recipe.dp), told.ep or (same and recipe.ep))


def _alone(row: MeasuredRow) -> Deployment:
    decode, prefill = row.decode, row.prefill
    clients = row.concurrency
    if clients is None:
        clients = (row.batch or 1) * decode.workers * (decode.gpus if decode.dp else 1)
    return Deployment(prefill, decode, clients)


def _engine(text: str) -> Engine:
    """ "5x8dp" -> five engines of eight GPUs with data-parallel attention; "e" for whole experts."""
    workers, _, rest = text.partition("x")
    return Engine(int(workers), int(rest.rstrip("dpe")), "dp" in rest, rest.endswith("e"))
