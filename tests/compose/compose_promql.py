"""What a PromQL query asks for: metric names, label matchers, labels grouped by. A real Prometheus evaluates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
SCRAPED = {"fleet": "containers", "job": "phaseplane"}
"""Labels that deploy/prometheus/prometheus.yml gives every series."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[a-zA-Z_:][\w:]*|\[[^\]]*\]|[=!]~|!=|\d[\w.]*|\S')
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "bool", "offset"}


@dataclass
class Asked:
    """selectors: (metric, [(label, operator, value)]). grouped: labels after `by` and `on`."""

    selectors: list[tuple[str, list[tuple[str, str, str]]]] = field(default_factory=list)
    grouped: set[str] = field(default_factory=set)


def asked(query: str) -> Asked:
    """Read a query; raises ValueError for a bracket that does not close."""
    tokens, found, at = _TOKEN.findall(query), Asked(), 0
    while at < len(tokens):
        token, following = tokens[at], tokens[at + 1] if at + 1 < len(tokens) else ""
        at += 1
        if token in _GROUPING:
            end = tokens.index(")", at)
            found.grouped |= {name for name in tokens[at + 1 : end] if name != ","}
            at = end + 1
        elif re.fullmatch(r"[a-zA-Z_:][\w:]*", token) and token not in _WORDS:
            if following in ("(", "by", "without"):
                continue  # a function
            matchers = []
            if following == "{":
                end = tokens.index("}", at)
                inside = [part for part in tokens[at + 1 : end] if part != ","]
                matchers = [
                    (inside[place], inside[place + 1], json.loads(inside[place + 2]))
                    for place in range(0, len(inside), 3)
                ]
                at = end + 1
            found.selectors.append((token, matchers))
    return found


def matches(labels: dict[str, str], matchers: list[tuple[str, str, str]]) -> bool:
    """Whether a series with these labels is selected."""
    for name, operator, wanted in matchers:
        value = labels.get(name, "")
        same = re.fullmatch(wanted, value) is not None if "~" in operator else value == wanted
        if same == operator.startswith("!"):
            return False
    return True


def recorded() -> dict[str, str]:
    """Recording rules: name -> expression."""
    return {rule["record"]: rule["expr"] for rule in _rules() if "record" in rule}


def alerts() -> dict[str, str]:
    """Alert -> what it compares: the expression without its last comparison."""
    found = {}
    for rule in _rules():
        if "alert" in rule:
            compared = re.fullmatch(r"(.*) [<>] [\d.]+", rule["expr"], re.DOTALL)
            assert compared, f"{rule['alert']} is not EXPRESSION COMPARISON NUMBER"
            found[rule["alert"]] = compared[1]
    return found


def panels() -> dict[str, str]:
    """Every query of every dashboard, by dashboard, panel and letter, for the fleet that SCRAPED names."""
    found = {}
    for file in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                name = f"{file.stem}/{panel['id']} {panel['title']}/{target['refId']}"
                found[name] = target["expr"].replace("$fleet", SCRAPED["fleet"]).replace("$__rate_interval", "15s")
    return found


def _rules() -> Iterator[dict[str, str]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]
