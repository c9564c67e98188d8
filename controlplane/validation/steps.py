"""Sections on step times: the latency model fitted to what DistServe and Splitwise measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from controlplane.validation import distserve, splitwise
from controlplane.validation.section import Section, percent
from nodes.fitting import Fit, StepSample, fit, relative_errors

BAR = 0.03
"""Median relative error of a group's fit."""
STEP_TOKENS = 2048
"""Largest step our instances compute: longer prompts are cut into chunks of so many tokens."""
_COLUMNS = ("median error", "left out", "worst", "prefill", "decode")


def distserve_steps(data: Path) -> Section:
    """One fit for each of DistServe's profiles (engine, model, tp), both phases under the same coefficients."""
    rows, errors, left_out = [], [], []
    for engine in distserve.PROFILES:
        for model, by_tp in distserve.load(data, engine).items():
            for tp, coefficients in by_tp.items():
                base = distserve.base_profile(model, int(tp))
                prefill = distserve.prefill_samples(base, coefficients)
                decode = distserve.decode_samples(base, coefficients)
                found = fit([*prefill, *decode])
                errors.append(found.error)
                left_out.append(found.held_out)
                rows.append((engine, model.rsplit("/", maxsplit=1)[-1], f"TP{tp}", *_figures(found, prefill, decode)))
    return Section(
        title="Step times: DistServe's profiles of OPT on A100",
        verdict=f"{_span('Median error', errors)}, and {_span('on steps left out', left_out)}; the bar is "
        f"{percent(BAR, 0)} for each of {len(rows)} profiles.",
        table=[("engine", "model", "parallel", *_COLUMNS), *rows],
        notes=[
            "The published profiles are themselves fits: prefill a + b tokens + c sum of squared lengths, decode a + b "
            "context + c rows with other coefficients from 95 rows on. Steps are drawn from them over prompts of 64 to "
            "2,048 tokens in batches of 1, 2 and 4, and decodes of 1 to 128 rows with 128 to 1,024 tokens each.",
            f"One set of seven coefficients for both phases. {_LEFT_OUT} The worst steps are at 95 rows and more, "
            "where the published profiles jump, and some fall, with one row more.",
        ],
        passed=max(errors) <= BAR,
        figures=(("worst_group_error", max(errors)), ("worst_group_left_out", max(left_out))),
    )


def splitwise_steps(data: Path) -> Section:
    """One fit for each of Splitwise's groups (model, hardware, tp) to steps of up to STEP_TOKENS, one to all."""
    rows, errors, left_out, all_errors, prompts, impossible = [], [], [], [], [], 0
    for group, samples in splitwise.load(data).items():
        near = [one for one in samples.prefill if one.num_new_tokens <= STEP_TOKENS]
        found, whole = fit([*near, *samples.decode]), fit([*samples.prefill, *samples.decode])
        errors.append(found.error)
        left_out.append(found.held_out)
        all_errors.append(whole.error)
        prompts.append(_error(whole, samples.prefill))
        impossible += len(samples.impossible)
        everything = (percent(whole.error), percent(whole.held_out), percent(prompts[-1]))
        figures = _figures(found, near, samples.decode)
        rows.append((group.model, group.hardware, f"TP{group.tp}", *figures, *everything))
    within = sum(one <= BAR for one in prompts)
    wide = f"steps of up to {STEP_TOKENS:,} tokens"
    return Section(
        title="Step times: Splitwise's measurements of Llama-2-70B and BLOOM-176B",
        verdict=f"{_span(f'Median error on {wide}', errors)}, and {_span('on steps left out', left_out)}; on all steps "
        f"{_span('', all_errors)}; the bar is {percent(BAR, 0)} for each of {len(rows)} groups. Prompts alone, of any "
        f"length, are within it in {within} of them only (up to {percent(max(prompts), 0)}).",
        table=[
            ("model", "class", "parallel", *_COLUMNS, "all steps", "all, left out", "all, prefill"),
            *rows,
        ],
        notes=[
            f"The first five columns are of a fit to {wide}, as large as a step is here; the last three of one to all. "
            "Prompts beyond that are where the form fails: measured seconds a token rise by 25 to 60 % from 2,048 to "
            "8,192 tokens in one batch at TP4 and TP8, whether of one prompt or of sixteen, and fall again beyond.",
            f"One sample a configuration, the median of its repetitions. {_LEFT_OUT} The power-capped H100 rows are "
            "derived from the others and left out. Decode does not depend on context in these measurements.",
            f"{impossible} configurations (512-token prompts, 64 at once, TP2) are left out: their prompts would have "
            "been computed above the accelerators' peak, so the batch did not run at once.",
        ],
        passed=max(errors) <= BAR and max(all_errors) <= BAR,
        figures=(
            ("worst_group_error", max(errors)), ("worst_group_left_out", max(left_out)),
            ("worst_group_error_all_steps", max(all_errors)),
        ),
    )  # fmt: skip


_LEFT_OUT = "Left out: a fifth of the steps at a time, predicted by a fit to the others."


def _figures(found: Fit, prefill: Sequence[StepSample], decode: Sequence[StepSample]) -> tuple[str, ...]:
    return (
        percent(found.error), percent(found.held_out), percent(found.worst, 0), percent(_error(found, prefill)),
        percent(_error(found, decode)),
    )  # fmt: skip


def _error(found: Fit, samples: Sequence[StepSample]) -> float:
    return statistics.median(relative_errors(samples, found.coefficients))


def _span(what: str, errors: Sequence[float]) -> str:
    return f"{what} {percent(min(errors))} to {percent(max(errors))}".strip()
