"""JSON of GET and PUT /v1/classes: the objectives of each traffic class, and what the fleet's hardware costs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from transfer.api import MAX_VERSION
from transfer.autopilot import MAX_NAME_CHARS
from transfer.terms import Slo, Struct

MAX_OBJECTIVE_S = 86400.0


class ClassSetting(Struct, frozen=True):
    """slo None: no objectives, served and shown apart. configured: what the control plane's settings say."""

    name: str
    slo: Slo | None
    configured: Slo | None


class PriceView(Struct, frozen=True):
    """What instances of one kind cost in dollars, each, as their nodes say; it cannot be changed here."""

    hardware: str
    num_gpus: int
    price_per_hour: float
    num_instances: int = 1


class ClassesView(Struct, frozen=True):
    """version: of the fleet."""

    version: int
    classes: tuple[ClassSetting, ...]
    prices: tuple[PriceView, ...] = ()


class ClassesRequest(Struct, frozen=True):
    """New objectives by class, None for none, above 0 and up to MAX_OBJECTIVE_S; a class that is not named keeps its
    own. base_version: as of ApplyRequest."""

    base_version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
    classes: dict[str, Slo | None]
    actor: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = "operator"
