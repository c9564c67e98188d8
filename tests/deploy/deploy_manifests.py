"""Kubernetes manifests as tests read them: by kind and name, pods with their claims, selectors and whom they mean."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
HELM = ROOT / "deploy" / "helm"
PLAIN = ROOT / "deploy" / "kubernetes"
WORKLOADS = ("Deployment", "StatefulSet")

Manifest = dict[str, Any]


def script(name: str, folder: Path = ROOT / "deploy") -> ModuleType:
    """One of the scripts in deploy/, which are no package."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Pod:
    """What a workload makes. name: the workload's."""

    name: str
    labels: dict[str, str]
    spec: Manifest
    claims: tuple[str, ...]

    @property
    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def main(self) -> Manifest:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def secrets(self) -> set[str]:
        return {volume["secret"]["secretName"] for volume in self.spec["volumes"] if "secret" in volume}

    def volume(self, name: str) -> Manifest:
        return dict(next(volume for volume in self.spec["volumes"] if volume["name"] == name))


class Manifests:
    """A set of manifests."""

    def __init__(self, text: str) -> None:
        self.all: list[Manifest] = [document for document in yaml.safe_load_all(text) if document]

    def kind(self, kind: str) -> dict[str, Manifest]:
        return {one["metadata"]["name"]: one for one in self.all if one["kind"] == kind}

    @property
    def pods(self) -> dict[str, Pod]:
        return {
            name: Pod(
                name,
                one["spec"]["template"]["metadata"]["labels"],
                one["spec"]["template"]["spec"],
                tuple(claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())),
            )
            for kind in WORKLOADS
            for name, one in self.kind(kind).items()
        }

    def meant(self, selector: dict[str, Any]) -> set[str]:
        """The workloads whose pods a selector matches: of a Service, or with matchLabels."""
        wanted = selector.get("matchLabels", selector)
        return {name for name, pod in self.pods.items() if wanted.items() <= pod.labels.items()}

    def may_reach(self, pod: str, port: int) -> set[str]:
        """Whose pods network policies let connect to that port of that workload's pods."""
        found = set(self.pods)
        for policy in self.kind("NetworkPolicy").values():
            spec = policy["spec"]
            if "Ingress" in spec["policyTypes"] and pod in self.meant(spec["podSelector"]):
                rules = [rule for rule in spec.get("ingress", ()) if _opens(rule, port)]
                found &= {name for rule in rules for peer in rule["from"] for name in self._peers(peer)}
            if "Egress" in spec["policyTypes"]:
                for source in self.meant(spec["podSelector"]):
                    rules = [rule for rule in spec["egress"] if _opens(rule, port) and "to" in rule]
                    if pod not in {name for rule in rules for peer in rule["to"] for name in self._peers(peer)}:
                        found.discard(source)
        return found

    def _peers(self, peer: Manifest) -> set[str]:
        return self.meant(peer["podSelector"]) if "podSelector" in peer else set()


def _opens(rule: Manifest, port: int) -> bool:
    return "ports" not in rule or port in {one["port"] for one in rule["ports"]}


def mebibytes(quantity: str) -> int:
    """ "3Gi" or "512Mi"."""
    number, unit = int(quantity[:-2]), quantity[-2:]
    return number * {"Mi": 1, "Gi": 1024}[unit]
