"""What is shown, as one JSON document: for `e`, and for `--once --json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ui.errors import CliError
from ui.insight import stage_shares
from ui.tui.draw import verdict_sentence
from ui.tui.model import Picture
from ui.tui.pen import Pen


def document(picture: Picture, pen: Pen) -> dict[str, Any]:
    """The figures of the API under their own names, beside the verdict."""
    found = picture.verdict
    fleet = picture.fleet
    return {
        "at_s": picture.at_s,
        "mode": picture.mode,
        "verdict": {
            "kind": found.kind, "sentence": verdict_sentence(pen, picture, found), "attainment": found.attainment,
            "target": picture.target, "troubles": [one.key for one in found.troubles],
        },
        "stages": {name: share for name, _, share in stage_shares(fleet.stages_s)} if fleet is not None else {},
        "fleet": fleet,
        "autopilot": picture.autopilot,
        "kv": picture.kv,
        "requests": list(picture.records),
        "audit": list(picture.audit),
    }  # fmt: skip


def export(picture: Picture, directory: Path, pen: Pen) -> Path:
    """Write the document into a new file there and return its name. Raises CliError when it cannot."""
    stamp = pen.stamp(picture.at_s)
    text = msgspec.json.format(msgspec.json.encode(document(picture, pen)), indent=2)
    for number in range(100):
        path = directory / (f"phaseplane-{stamp}.json" if not number else f"phaseplane-{stamp}-{number}.json")
        try:
            with path.open("xb") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError as error:
            raise CliError(pen.say("tui.error.cannot_write", path=path, reason=error.strerror)) from None
        return path
    raise CliError(pen.say("tui.error.too_many", path=directory))
