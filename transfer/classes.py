"""JSON of GET and PUT /v1/classes: the objectives of each traffic class, and what the fleet's hardware costs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from transfer.api import MAX_NAME_CHARS, MAX_VERSION
from transfer.terms import Slo, Struct

MAX_OBJECTIVE_S = 86400.0
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_OBJECTIVE_S)]


class Objectives(Struct, frozen=True):
    """What one class is to be held to from now on, in seconds; as Slo, but checked."""

    ttft_s: Seconds
    tpot_s: Seconds
    e2e_s: Seconds | None = None

    @property
    def slo(self) -> Slo:
        return Slo(ttft_s=self.ttft_s, tpot_s=self.tpot_s, e2e_s=self.e2e_s)


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
    """New objectives by class, None for none; what is not named stays. base_version: as of ApplyRequest."""

    base_version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
    classes: dict[str, Objectives | None]
    actor: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = "operator"
