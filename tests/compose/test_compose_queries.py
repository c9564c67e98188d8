"""Dashboards and rules ask for names and labels that /metrics has, and get data from a fleet that serves."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_promql import DASHBOARDS, ROOT, RULES, SCRAPED, alerts, asked, matches, panels, recorded

DOCUMENT = ROOT / "docs" / "metrics.md"
KEY = "a long secret"
QUERIES = {**recorded(), **alerts(), **panels()}
LOAD_S = 25


def documented() -> dict[str, tuple[set[str], str]]:
    """Name on /metrics -> its labels and type; a test of the gateway keeps the document equal to what is served."""
    rows = re.findall(
        r"^\| `((?:phaseplane_|vllm:)\w+)`(?: `\{([\w,]+)\}`)? \| (\w+) \|", DOCUMENT.read_text(), re.MULTILINE
    )
    return {name: (set(filter(None, labels.split(","))), kind) for name, labels, kind in rows}


def labels_of(metric: str) -> set[str] | None:
    """Labels of a documented series, or what a recording rule groups by or passes on; None for an unknown name."""
    if metric == "up":
        return set()
    if metric in recorded():
        inner = asked(recorded()[metric])
        return inner.grouped or set().union(*(labels_of(name) or set() for name, _ in inner.selectors))
    known = documented()
    if metric in known and known[metric][1] != "histogram":
        return known[metric][0] | ({"engine", "model_name"} if metric.startswith("vllm:") else set())
    family, _, part = metric.rpartition("_")
    if part in ("bucket", "count", "sum") and known.get(family, (set(), ""))[1] == "histogram":
        return known[family][0] | ({"le"} if part == "bucket" else set())
    return None


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_asks_for_what_there_is(name: str) -> None:
    found = asked(QUERIES[name])
    assert found.selectors
    everything: set[str] = set(SCRAPED)
    for metric, matchers in found.selectors:
        labels = labels_of(metric)
        assert labels is not None, f"{metric} is not in docs/metrics.md"
        unknown = {label for label, _, _ in matchers} - labels - set(SCRAPED)
        assert not unknown, f"{metric} has no label {unknown}"
        everything |= labels
    assert found.grouped <= everything


def test_a_query_is_read() -> None:
    found = asked('sum by (a, le) (rate(x_total{a=~"p|q",b!="r, }"}[5m])) / on (a) group_left () y and on () z > 0.5')
    assert found.selectors == [("x_total", [("a", "=~", "p|q"), ("b", "!=", "r, }")]), ("y", []), ("z", [])]
    assert found.grouped == {"a", "le"}
    assert matches({"a": "q", "b": "s"}, found.selectors[0][1])
    assert not matches({"a": "pq", "b": "s"}, found.selectors[0][1])
    assert not matches({"a": "q", "b": "r, }"}, found.selectors[0][1])


def test_the_dashboards_are_drawn_from_their_tables() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboards", DASHBOARDS.parent / "make_dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    drawing = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = drawing
    spec.loader.exec_module(drawing)
    drawn = {f"{one.name}.json": drawing.text_of(one) for one in (drawing.GOODPUT, drawing.INSTANCES)}
    kept = {file.name: file.read_text() for file in DASHBOARDS.glob("*.json")}
    assert kept == drawn, "run python deploy/grafana/make_dashboards.py"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an emulated fleet with a key, under load until the end."""
    place = tmp_path_factory.mktemp("fleet")
    environment = os.environ | {"PHASEPLANE_SERVER_API_KEYS": f'{{ local = "{KEY}" }}', "PHASEPLANE_API_KEY": KEY}
    cli = [sys.executable, "-m", "ui.cli"]
    command = [*cli, "up", "--engine", "emulated", "--prefill", "2", "--decode", "2", "--pool", "1", "--port", "0"]
    command += [
        "--no-console",
        "--ssd-dir",
        str(place / "ssd"),
        "--state",
        str(place / "state"),
        "--ready-file",
        str(place / "ready"),
    ]
    with (place / "log").open("w") as log:
        fleet = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    load = None
    try:
        deadline = time.monotonic() + 60
        while not (place / "ready").exists():
            assert fleet.poll() is None, (place / "log").read_text()
            assert time.monotonic() < deadline, (place / "log").read_text()
            time.sleep(0.1)
        url = json.loads((place / "ready").read_text())["url"]
        offer = [*cli, "bench", "--url", url, "--rate", "8", "--duration", "90", "--trace", "generated:conversation"]
        load = subprocess.Popen(offer, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        yield url
    finally:
        for process in filter(None, (load, fleet)):
            process.send_signal(signal.SIGINT)
            process.wait(30)


@pytest.mark.slow
def test_every_selector_finds_series_in_a_live_scrape(serving: str) -> None:
    time.sleep(5)
    text = ask(f"{serving}/metrics", {"Authorization": f"Bearer {KEY}"}).decode()
    series = [(name, dict(re.findall(r'(\w+)="([^"]*)"', labels))) for name, labels in _samples(text)]
    empty = []
    for name, query in QUERIES.items():
        for metric, matchers in asked(query).selectors:
            if metric == "up" or metric in recorded():
                continue
            if not any(one == metric and matches(labels | SCRAPED, matchers) for one, labels in series):
                empty.append((name, metric, matchers))
    assert empty == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus here; run `make compose-tools`")
def test_every_query_returns_data_from_a_real_prometheus(serving: str, tmp_path: Path) -> None:
    subprocess.run(["promtool", "check", "rules", RULES], check=True, capture_output=True)
    with prometheus(serving, tmp_path) as base:
        time.sleep(LOAD_S)
        empty = [name for name, query in QUERIES.items() if not evaluate(base, query)]
        assert empty == []
        firing = json.loads(ask(f"{base}/api/v1/alerts"))["data"]["alerts"]
        assert [alert["labels"]["alertname"] for alert in firing] == []
        running = evaluate(base, "vllm:num_requests_running")
        assert all(":" not in one["metric"]["engine"] for one in running)
        used = {one["metric"]["instance"] for one in evaluate(base, "phaseplane:kv_use")}
        assert len(used) == 5, "the label instance names instances of the fleet"


@contextlib.contextmanager
def prometheus(fleet: str, place: Path) -> Iterator[str]:
    """The URL of one with our configuration, in which only addresses, files and times are of the test."""
    config = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    job = config["scrape_configs"][0]
    job["authorization"]["credentials_file"] = str(place / "api_key")
    job["static_configs"][0]["targets"] = [urllib.parse.urlsplit(fleet).netloc]
    config["scrape_configs"] = [job]
    (place / "api_key").write_text(KEY)
    (place / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = ["prometheus", f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/data"]
    with (place / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(20)


def evaluate(base: str, query: str) -> list[dict[str, Any]]:
    """Its series now; raises for a query that Prometheus refuses. NaN is no data."""
    answer = json.loads(ask(f"{base}/api/v1/query?{urllib.parse.urlencode({'query': query})}"))
    return [one for one in answer["data"]["result"] if one["value"][1] != "NaN"]


def ask(url: str, headers: dict[str, str] | None = None) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=10) as answer:
        return answer.read()


def _samples(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+$", text, re.MULTILINE)
