"""Writes deploy/kubernetes/*.yaml, what the chart renders, for clusters without Helm. Run it after a change there.

Renders with Helm's own engine, which helm-python-sdk carries; a test holds the files to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

HERE = Path(__file__).parent
CHART = HERE / "phaseplane"
PLAIN = HERE.parent / "kubernetes"
VALUES: dict[str, Path | None] = {"cpu": None, "h800-h20": HERE / "examples" / "h800-h20.yaml"}
"""Name of the plain file -> the values it is rendered with; None: the chart's own."""
HEADER = "# Made by deploy/helm/render.py from the chart deploy/helm/phaseplane. The keys it needs: docs/cluster.md.\n"
NOTES = "phaseplane/templates/NOTES.txt"


def render(values: dict[str, Any], name: str = "phaseplane", namespace: str = "phaseplane") -> dict[str, str]:
    """Template -> text, as `helm template`. Raises HelmValuesError or HelmRenderError, each with a sentence."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        return chart.render(values, name=name, namespace=namespace, is_install=True)


def values_of(file: Path | None) -> dict[str, Any]:
    return {} if file is None else dict(yaml.safe_load(file.read_text()))


def plain(values: dict[str, Any]) -> str:
    """All manifests in one file, without Helm's own marks."""
    texts = [text for template, text in sorted(render(values).items()) if template != NOTES]
    documents = [part.strip("\n") for text in texts for part in f"\n{text}".split("\n---")]
    lines = "\n---\n".join(part for part in documents if part.strip()).splitlines()
    kept = [line.rstrip() for line in lines if "helm.sh/chart:" not in line and "managed-by:" not in line]
    return HEADER + "\n".join(line for line in kept if line) + "\n"


if __name__ == "__main__":
    for name, file in VALUES.items():
        (PLAIN / f"{name}.yaml").write_text(plain(values_of(file)))
