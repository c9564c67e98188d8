"""What the chart renders runs: its pods' programs serve together, with their variables, keys, volumes, user and probes,
and a pod that is stopped hands over first. Images and a cluster are not needed; root is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deploy_manifests import ROOT

OWN_NETWORK = ("unshare", "--net", "--mount")


def why_not_here() -> str | None:
    if os.getuid() != 0:
        return "pods of one's own need root"
    if ROOT.is_relative_to("/tmp"):
        return f"pods have a /tmp of their own, which hides this checkout in {ROOT}"
    probe = subprocess.run([*OWN_NETWORK, "true"], check=False, capture_output=True)
    return "this machine gives nobody a network of their own" if probe.returncode else None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.weights,
    pytest.mark.timeout(240),
    pytest.mark.skipif(why_not_here() is not None, reason=why_not_here() or ""),
]


@pytest.fixture(scope="module")
def seen(smollm2_dir: Path) -> Iterator[dict[str, Any]]:
    """Not below tmp_path, which the pods' user may not enter."""
    with tempfile.TemporaryDirectory(prefix="phaseplane-pods-") as directory:
        Path(directory).chmod(0o755)
        command = [*OWN_NETWORK, sys.executable, str(ROOT / "tests" / "deploy" / "deploy_fleet.py"), directory]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=220)
        assert done.returncode == 0, done.stderr
        yield json.loads(done.stdout)


def test_the_pods_make_a_fleet_that_answers(seen: dict[str, Any]) -> None:
    assert seen["xpyd"] == "1P2D"
    assert "Paris" in seen["capital"]


def test_a_pod_hands_over_what_it_does_before_it_stops(seen: dict[str, Any]) -> None:
    assert seen["drain"] == [0, ""]
    assert seen["ready while drained"] is False
    assert seen["status"] == 0
    assert seen["same story"] is True


def test_the_last_of_its_kind_is_not_emptied(seen: dict[str, Any]) -> None:
    status, sentence = seen["drain of the last"]
    assert status == 1
    assert "is the last ready decode instance of smollm2-135m" in sentence


def test_a_pod_reads_its_keys_and_writes_nowhere_else(seen: dict[str, Any]) -> None:
    said = seen["inside"][1].splitlines()
    assert said[:2] == ["10001", "1"]
    assert [line.split(": ")[-1] for line in said[2:]] == ["Read-only file system"] * 2


def test_every_pod_ends_in_order(seen: dict[str, Any]) -> None:
    assert set(seen["stopped"].values()) == {0}
