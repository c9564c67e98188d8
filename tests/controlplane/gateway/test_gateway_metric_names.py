"""docs/metrics.md and the HELP lines know every name that /metrics serves, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from gateway_calls import CHAT, post
from gateway_fakes import front, items

from controlplane.core.config import CoreConfig
from controlplane.core.scheduler import SchedulerCore
from controlplane.gateway.metric_help import HELP

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


async def scrape() -> list[str]:
    """Lines of a page on which no family is left out for want of samples."""
    async with front() as f:
        f.reply(lambda spec: items(spec.request_id, "ab", "c"))
        f.core.fleet = msgspec.structs.replace(
            f.core.fleet, attainment=0.5, goodput=msgspec.structs.replace(f.core.fleet.goodput, cost_per_good=0.01)
        )
        f.core.metrics = SchedulerCore(CoreConfig(), 1, 0).metrics  # type: ignore[method-assign]
        assert (await post(f, "/v1/chat/completions", CHAT))[0] == 200
        record = f.archive.records[0]
        f.gateway.metrics.finished(msgspec.structs.replace(record, stages_s={"queue": 0.1}))
        async with f.client.get("/metrics") as response:
            assert response.status == 200
            return (await response.text()).splitlines()


async def test_the_document_lists_exactly_the_served_names_with_their_types() -> None:
    types = {line.split()[2]: line.split()[3] for line in await scrape() if line.startswith("# TYPE ")}
    rows = re.findall(r"^\| `((?:phaseplane_|vllm:)\w+)`[^|]*\| (\w+) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a name is listed twice"
    assert dict(rows) == types


async def test_labels_are_those_the_document_says() -> None:
    served: dict[str, set[str]] = {}
    for line in await scrape():
        if not line.startswith("#"):
            name, labels = re.sub(r"_(bucket|sum|count)(?=[{ ])", "", line), re.findall(r'(\w+)="', line)
            served[re.split(r"[{ ]", name)[0]] = set(labels) - {"le", "model_name", "engine"}
    rows = re.findall(r"^\| `((?:phaseplane_|vllm:)\w+)`(?: `\{([\w,]+)\}`)? \|", DOCUMENT.read_text(), re.MULTILINE)
    assert {name: set(filter(None, labels.split(","))) for name, labels in rows} == served


async def test_every_help_line_is_a_sentence_and_nothing_else_is_described() -> None:
    helps = dict(line.split(" ", 3)[2:] for line in await scrape() if line.startswith("# HELP "))
    assert helps == HELP
    for name, sentence in helps.items():
        assert re.fullmatch(r"[A-Z].{14,}\.", sentence), name
