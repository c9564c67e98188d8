"""Time to first token: a fixed front, the prompt's own prefill, and the wait behind other prompts and running steps.

Queueing. `clients` in closed loop alternate between the prefill station (time s a prompt, all its engines together)
and decoding (Z = output tokens x TPOT). By mean value analysis of that network (Schweitzer's approximation) a prompt
spends R there with R = s (1 + clients R / (R + Z)): next to nothing in queue while clients s < Z, clients s - Z
beyond. The first requests come all at once and, with lengths nearly equal, later ones still in waves: a fitted share
of half of clients x s. Where KV does not fit for all clients, the rest waits for others to end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from controlplane.validation.silicon_fit import Array, Coefficient
from controlplane.validation.silicon_table import Table
from controlplane.validation.silicon_tpot import Served, prompt_s

COEFFICIENTS = (
    Coefficient("front_s", 0.03, 0.8, 0.6, ("service",)),
    Coefficient("prefill", 1.0, 0.3, 0.3, ("service",)),
    Coefficient("queue", 0.6, 0.5, 0.4, ("service",)),
    Coefficient("waves", 0.15, 0.7, 0.5, ("service",)),
    Coefficient("steps", 1.0, 0.5, 0.5, ("service",)),
    Coefficient("pieces", 0.5, 0.7, 0.5),
    Coefficient("full", 0.2, 0.7, 0.3, ("mode",)),
    Coefficient("transfer", 1.0, 0.7, 0.4),
    Coefficient("ttft_yearly", 1.0, 0.2, 0.2),
)
"""pieces: steps that a prompt of PIECE tokens is spread over beside decoding. full: the share of the wait for KV that
a typical request sees."""
PIECE = 8192.0


def ttft_s(columns: Table, served: Served, tpot: Mapping[str, Array], log: Mapping[str, Array]) -> Array:
    """Seconds; `tpot`: logarithms of the coefficients `served` was made with."""
    at = {name: np.exp(value) for name, value in log.items()}
    apart = columns["apart"] > 0
    alone = prompt_s(columns, {name: np.exp(value) for name, value in tpot.items()}, True)
    station = served.prompt_s / columns["prefill_engines"] * at["prefill"]
    decoding = columns["osl"] * served.tpot_s
    excess = station * columns["clients"] - decoding
    spent = 0.5 * (excess + np.sqrt(excess**2 + 4.0 * station * decoding))
    waves = at["waves"] * 0.5 * (columns["clients"] - 1.0) * station
    engine = columns["clients"] / columns["engines"]
    over = np.maximum(engine - columns["capacity"], 0.0) / columns["capacity"] * decoding
    piece = np.where(apart, 0.0, at["pieces"] * columns["isl"] / PIECE)
    moved = columns["kv_bytes"] * columns["isl"] / columns["link"] * np.where(apart, at["transfer"], 0.0)
    age = at["ttft_yearly"] ** ((columns["months"] - 13.0) / 12.0)
    own = at["front_s"] + at["prefill"] * alone + served.step_s * (at["steps"] + piece) + moved
    return np.asarray(age * (own + at["queue"] * np.maximum(spent - station, 0.0) + waves) + at["full"] * over)
