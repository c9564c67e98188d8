"""What makes a division of a fleet so: settings of the control plane, and what starts and ends instances."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from controlplane.core.config import DEFAULT_CLASS
from controlplane.planner.commands import agents
from controlplane.planner.fleets import Fleet, Part, Shape
from controlplane.planner.wants import Want
from transfer.terms import Role, Slo

CONFIG = "phaseplane.toml"


def apply_config(models: Sequence[tuple[Want, Mapping[str, Slo | None]]]) -> str:
    """TOML. Each model has a traffic class of its own where its objectives are given, so that its goodput is seen
    apart; requests name it in the header x-phaseplane-class."""
    lines = []
    for place, (want, _) in enumerate(models):
        lines += ["[model]" if place == 0 else f"[models.{_text(want.name)}]", f"name = {_text(want.model)}"]
        lines += ['engine = "emulated"', ""]
    for want, slos in models:
        for name, slo in slos.items():
            if slo is not None:
                lines.append(f"[classes.{_text(want.name if name == DEFAULT_CLASS else f'{want.name}-{name}')}]")
                objectives = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "e2e_s": slo.e2e_s}
                lines += [*(f"{key} = {value:g}" for key, value in objectives.items() if value is not None), ""]
    return "\n".join(lines).rstrip() + "\n"


def apply_commands(models: Sequence[tuple[Want, Fleet, Fleet | None]]) -> Iterator[str]:
    """(model, its fleet, the one that serves it now)."""
    if all(now is None for _, _, now in models):
        yield f"python -m controlplane.main --config {CONFIG}"
    for want, fleet, now in models:
        there, wanted = _counted(now), _counted(fleet)
        for (shape, role), count in (there - wanted).items():
            yield f"phaseplane drain ID  # {count}x{shape}:{role} of {want.name}, then stop what is empty"
        more = tuple(Part(shape, role, count) for (shape, role), count in (wanted - there).items())
        pools = fleet.pools if now is None else ()
        yield from agents(Fleet(more, pools), want.model, f"{want.name}-", now)


def _counted(fleet: Fleet | None) -> Counter[tuple[Shape, Role]]:
    found: Counter[tuple[Shape, Role]] = Counter()
    for part in fleet.parts if fleet is not None else ():
        found[part.shape, part.role] += part.count
    return found


def _text(text: str) -> str:
    """Quoted as TOML wants it."""
    return json.dumps(text, ensure_ascii=False)
