"""Draws a simulated run: in the terminal by plotext, into a PNG file by matplotlib. Both are optional packages."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.sim.report import SimReport
from controlplane.sim.series import Floats, Series
from transfer.errors import InvalidValue

INSTALL = "install it with `pip install 'phaseplane[plan]'`"
TERMINAL_ROWS, NUM_TICKS = 14, 6
MARKERS = (".", "o", "*")
PNG_INCHES = (13.0, 8.0)
PNG_DPI = 120
INK, GREY, BLUE, ORANGE, GREEN, RED = "#1a1a1a", "#9a9a9a", "#1f6fb4", "#d9822b", "#2a8f5a", "#c0392b"


def check_packages(terminal: bool, png: bool) -> None:
    """Raises InvalidValue when what is to be drawn cannot be."""
    for name, wanted in (("plotext", terminal), ("matplotlib", png)):
        if wanted:
            package(name)


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InvalidValue(f"plots need {name.partition('.')[0]}, which is not installed; {INSTALL}") from None


def terminal_plots(series: Series, report: SimReport, width: int) -> str:
    """Two plots as text: rates over time, and TTFT beside its objective. Lines differ by their characters."""
    plotext = package("plotext")
    rates = [
        ("offered", series.offered_per_s), ("completed", series.throughput_per_s), ("good", series.goodput_per_s)
    ]  # fmt: skip
    slo = next((row.slo for row in report.classes if row.slo is not None), None)
    texts = [_one(plotext, "requests a second", series.at_s, rates, None, width)]
    latencies = [("p50", series.ttft_p50_s), ("p90", series.ttft_p90_s)]
    texts.append(_one(plotext, "TTFT, s", series.at_s, latencies, slo.ttft_s if slo else None, width))
    return "\n".join(texts)


def write_png(path: Path, series: Series, report: SimReport) -> None:
    """Four panels: rates, TTFT and TPOT against objectives, use of the phases. Raises InvalidValue."""
    figure = package("matplotlib.figure").Figure(figsize=PNG_INCHES, dpi=PNG_DPI)
    axes = figure.subplots(2, 2, sharex=True)
    figure.subplots_adjust(left=0.05, right=0.98, top=0.9, bottom=0.07, hspace=0.18, wspace=0.12)
    about = report.about
    figure.suptitle(f"{about.fleet}  ·  {about.model}  ·  {about.policy}  ·  {about.trace}", color=INK, fontsize=11)
    slo = next((row.slo for row in report.classes if row.slo is not None), None)
    _panel(
        axes[0, 0], "requests a second", series.at_s,
        (("offered", series.offered_per_s, GREY), ("completed", series.throughput_per_s, BLUE),
         ("good", series.goodput_per_s, GREEN)),
    )  # fmt: skip
    _panel(
        axes[0, 1], "requests at once per instance", series.at_s,
        (("in prefill, per prefill instance", series.prefilling, ORANGE),
         ("decoding, per decode instance", series.decoding, BLUE)),
    )  # fmt: skip
    for place, name, p50, p90, most in (
        (axes[1, 0], "TTFT, seconds", series.ttft_p50_s, series.ttft_p90_s, slo.ttft_s if slo else None),
        (axes[1, 1], "TPOT, seconds", series.tpot_p50_s, series.tpot_p90_s, slo.tpot_s if slo else None),
    ):
        _panel(place, name, series.at_s, (("p50", p50, BLUE), ("p90", p90, ORANGE)))
        if most is not None:
            place.axhline(most, color=RED, linestyle="--", linewidth=1, label=f"objective, {most:g} s")
            place.legend(frameon=False, fontsize=9)
        place.set_xlabel("seconds")
    for place in axes.flat:
        place.set_ylim(bottom=0)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InvalidValue(f"cannot write the plot {path} ({reason}); give another file with --png") from None


def _panel(place: Any, title: str, at_s: Floats, lines: tuple[tuple[str, Floats, str], ...]) -> None:
    for label, values, colour in lines:
        known = ~np.isnan(values)
        place.plot(at_s[known], values[known], color=colour, linewidth=1.4, label=label)
    place.set_title(title, loc="left", fontsize=10, color=INK)
    place.grid(alpha=0.25)
    place.spines[["top", "right"]].set_visible(False)
    place.legend(frameon=False, fontsize=9)


def _one(
    plotext: Any, title: str, at_s: Floats, lines: list[tuple[str, Floats]], objective: float | None, width: int
) -> str:
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, TERMINAL_ROWS)
    figure.theme("colorless")
    figure.title(_title(title, lines, objective))
    end_s = float(at_s[-1])
    figure.ruler("x").lim(0.0, end_s)
    ticks = np.linspace(0.0, end_s, NUM_TICKS).tolist()
    figure.ruler("x").ticks(ticks, [f"{tick:.0f}" if end_s > NUM_TICKS else f"{tick:.1f}" for tick in ticks])
    figure.ruler("y").lim(0.0, None)
    for (label, values), marker in zip(lines, MARKERS, strict=False):
        known = ~np.isnan(values)
        if known.any():
            signal = figure.signal(at_s[known].tolist(), values[known].tolist(), marker=marker)
            signal.label(label)
            figure.draw(signal)
    if objective is not None:
        figure.line(objective, label="objective")
    figure.label("seconds", axis="x")
    figure.legend(False)
    text: str = figure.build().string(colorless=True)
    return text


def _title(title: str, lines: list[tuple[str, Floats]], objective: float | None) -> str:
    """With what the characters stand for: a legend would hide what it explains."""
    keys = [f"{marker} {label}" for (label, _), marker in zip(lines, MARKERS, strict=False)]
    return f"{title}:  {'   '.join([*keys, *(['─ objective'] if objective is not None else [])])}"
