"""Fits the coefficients of LatencyProfile to measured step times, and says how far off the fit is on steps left out.

Least squares of relative errors, robust against steps the form cannot describe. It reads no files.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from scipy.optimize import least_squares

from nodes.engines.prediction import StepArguments, largest_steps
from transfer.errors import InvalidValue
from transfer.profile import LatencyProfile, StepRange

BOUNDS: dict[str, tuple[float, float]] = {
    "mfu": (0.01, 1.5), "mfu_attention": (0.001, 1.5), "mbu": (0.02, 1.5), "mbu_kv": (0.02, 1.5),
    "alpha_s": (1e-6, 1.0), "beta_s": (1e-9, 1e-2), "allreduce_s": (1e-7, 1e-3), "overlap": (1e-3, 1.0),
    "scale_up_efficiency": (0.02, 1.5), "send_s": (1e-7, 1e-2),
}  # fmt: skip
COEFFICIENTS = ("mfu", "mfu_attention", "mbu", "mbu_kv", "alpha_s", "beta_s", "overlap")
"""Those one kind of instance can tell apart; collectives take instances of several tp."""
OUTLIER = 0.02
"""Relative error from which a step weighs less than its square."""
PULL = 0.002
"""How weakly coefficients the steps do not determine are held where they were."""
FOLDS = 5
FAR_OFF = 0.25
"""Steps that the fit misses by more are not among those that it is known for."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step: what LatencyProfile.step_s takes, and the seconds it took on an instance like `profile`."""

    profile: LatencyProfile
    num_new_tokens: int
    context_tokens: int
    batch: int
    attention_pairs: int
    seconds: float

    def predicted_s(self, profile: LatencyProfile) -> float:
        return profile.step_s(self.num_new_tokens, self.context_tokens, self.batch, self.attention_pairs)


OnTimed = Callable[[int, float], None]
"""(steps timed, their share of all)."""


@dataclass(frozen=True, slots=True)
class Timed:
    """samples: one a configuration, num_timed: steps in all. spread: median over configurations of
    (p90 - median) / median."""

    samples: list[StepSample]
    num_timed: int
    spread: float


def spread(times: Sequence[float]) -> float:
    """How far the slow ones are from the middle: (p90 - median) / median."""
    ordered = sorted(times)
    middle = statistics.median(ordered)
    return (ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))] - middle) / middle


@dataclass(frozen=True, slots=True)
class Fit:
    """error: relative median error on the steps it was fitted to; held_out: on steps left out, in FOLDS parts;
    worst: the largest on those fitted to. largest: steps up to which the profile is known."""

    coefficients: Mapping[str, float]
    error: float
    held_out: float
    worst: float
    num_samples: int
    largest: StepRange

    def profile(self, base: LatencyProfile) -> LatencyProfile:
        """`base` with the fitted coefficients; its error is that of steps left out."""
        return msgspec.structs.replace(
            base, **self.coefficients, provenance="fitted", error=self.held_out, fitted_to=self.largest
        )


def fit(samples: Sequence[StepSample], free: Sequence[str] = COEFFICIENTS) -> Fit:
    """The coefficients `free` under which the samples' own profiles predict their seconds best.

    Raises InvalidValue for fewer samples than coefficients or a name that is none.
    """
    wrong = [name for name in free if name not in BOUNDS]
    if wrong or len(samples) < max(2, len(free)):
        raise InvalidValue(
            f"{len(samples)} steps cannot determine {', '.join(free)}; known coefficients: {', '.join(BOUNDS)}"
        )
    coefficients = solve(samples, free)
    errors = relative_errors(samples, coefficients)
    held_out: list[float] = []
    folds = min(FOLDS, len(samples))
    for fold in range(folds):
        train = [one for index, one in enumerate(samples) if index % folds != fold]
        held_out += relative_errors(samples[fold::folds], solve(train, free))
    return Fit(
        coefficients, statistics.median(errors), statistics.median(held_out), max(errors), len(samples),
        _known_to(samples, errors),
    )  # fmt: skip


def solve(samples: Sequence[StepSample], free: Sequence[str]) -> dict[str, float]:
    """The best of the solutions from full and from no overlap, deterministic."""
    base = samples[0].profile
    starts = [1.0, 0.01] if "overlap" in free else [base.overlap]
    lower, upper = (np.log([BOUNDS[name][side] for name in free]) for side in (0, 1))
    best, least = np.zeros(len(free)), float("inf")
    for overlap in starts:
        at = [overlap if name == "overlap" else getattr(base, name) or BOUNDS[name][0] for name in free]
        start = np.clip(np.log(at), lower + 1e-9, upper - 1e-9)
        found = least_squares(
            _residuals, start, bounds=(lower, upper), loss="cauchy", f_scale=OUTLIER, args=(samples, free, start),
            x_scale=0.1, max_nfev=200,
        )  # fmt: skip
        if found.cost < least:
            best, least = found.x, float(found.cost)
    return {name: float(np.exp(value)) for name, value in zip(free, best, strict=True)}


def _known_to(samples: Sequence[StepSample], errors: Sequence[float]) -> StepRange:
    close = [one for one, error in zip(samples, errors, strict=True) if error <= FAR_OFF] or samples
    return largest_steps(
        StepArguments(one.num_new_tokens, one.context_tokens, one.batch, one.attention_pairs) for one in close
    )


def relative_errors(samples: Iterable[StepSample], coefficients: Mapping[str, float]) -> list[float]:
    """|predicted / measured - 1| of each."""
    fitted: dict[int, LatencyProfile] = {}
    errors = []
    for one in samples:
        profile = fitted.get(id(one.profile))
        if profile is None:
            profile = fitted[id(one.profile)] = msgspec.structs.replace(one.profile, **coefficients)
        errors.append(abs(one.predicted_s(profile) / one.seconds - 1.0))
    return errors


def _residuals(at: np.ndarray, samples: Sequence[StepSample], free: Sequence[str], start: np.ndarray) -> np.ndarray:
    coefficients = {name: float(np.exp(value)) for name, value in zip(free, at, strict=True)}
    fitted = {id(one.profile): one.profile for one in samples}
    fitted = {key: msgspec.structs.replace(profile, **coefficients) for key, profile in fitted.items()}
    predicted = np.array([one.predicted_s(fitted[id(one.profile)]) for one in samples])
    residuals = np.log(predicted / np.array([one.seconds for one in samples]))
    return np.concatenate([residuals, PULL * (at - start)])
