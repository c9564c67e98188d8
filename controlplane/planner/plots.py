"""Draws the frontier of a plan: in the terminal by plotext, into a PNG file by matplotlib. Both are optional."""

from __future__ import annotations

from pathlib import Path

from controlplane.planner.report import PlanReport
from controlplane.sim.plots import BLUE, GREEN, GREY, INK, ORANGE, PNG_DPI, TERMINAL_ROWS, package
from transfer.errors import InvalidValue
from transfer.said import say

PNG_INCHES = (9.0, 5.5)


def terminal_plot(report: PlanReport, width: int) -> str:
    """o simulated, . estimated, C the chosen fleet; empty where there are too few points for a line."""
    points = report.frontier
    if len(points) < 2:
        return ""
    figure = package("plotext").figure
    figure.clear()
    figure.plot_size(width, TERMINAL_ROWS)
    figure.theme("colorless")
    figure.title("requests a second over $ an hour:  . estimated   o simulated   C chosen")
    figure.ruler("x").lim(0.0, None)
    figure.ruler("y").lim(0.0, None)
    for marker, chosen in (
        (".", [(one.price_per_hour, one.max_rate) for one in points if not one.simulated]),
        ("o", [(one.price_per_hour, one.max_rate) for one in points if one.simulated]),
        ("C", [(report.chosen.price_per_hour, report.chosen.max_rate)]),
    ):
        if chosen:
            xs, ys = zip(*chosen, strict=True)
            figure.draw(figure.signal(list(xs), list(ys), marker=marker))
    figure.label("$ an hour", axis="x")
    figure.legend(False)
    text: str = figure.build().string(colorless=True)
    return text


def write_png(path: Path, report: PlanReport) -> None:
    """The frontier, the fleets simulated, and the chosen one with its interval. Raises InvalidValue."""
    figure = package("matplotlib.figure").Figure(figsize=PNG_INCHES, dpi=PNG_DPI)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.07, right=0.97, top=0.93, bottom=0.1)
    prices, rates = [one.price_per_hour for one in report.frontier], [one.max_rate for one in report.frontier]
    axes.step(
        prices, rates, where="post", color=GREY, linewidth=1.4, label="frontier, estimated between what was simulated"
    )
    middle = max(prices, default=0.0) / 2
    for one in report.alternatives:
        colour = ORANGE if one.policy == "distserve" else BLUE
        axes.plot([one.price_per_hour], [one.max_rate], "o", color=colour, markersize=5)
        left = one.price_per_hour <= middle
        axes.annotate(
            one.label, (one.price_per_hour, one.max_rate), fontsize=8, color=INK, xytext=(5 if left else -5, -10),
            textcoords="offset points", ha="left" if left else "right",
        )  # fmt: skip
    own = report.chosen
    axes.errorbar(
        [own.price_per_hour], [own.max_rate], yerr=[[own.max_rate - own.low], [own.high - own.max_rate]], fmt="s",
        color=GREEN, capsize=4, label=f"chosen: {own.fleet}",
    )  # fmt: skip
    axes.set_xlabel("$ an hour")
    axes.set_title("requests a second at the target attainment", loc="left", fontsize=10, color=INK)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InvalidValue(say("planner.plot", path=path, reason=reason)) from None
