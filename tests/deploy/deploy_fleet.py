"""A fleet from the chart's manifests, run by deploy_kubelet.py.

Prints what was seen as JSON, for test_deploy_run.py."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

from deploy_kubelet import ADDRESS, Kubelet, Running, kubelet
from deploy_manifests import HELM, ROOT, Manifests, script

URL = f"http://{ADDRESS}:8000"
VALUES = {"engines": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}, "engineDefaults": {"kvGib": 0.25}}
CAPITAL = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 24}
COUNT = {"messages": [{"role": "user", "content": "Tell me a long story about a river."}], "max_tokens": 160}
DRAIN_S = 40
INSIDE = "id -u; wc -l </keys/nodes/data.key; touch /opt/x; touch /keys/nodes/x"


def ask(key: str, question: dict[str, Any]) -> str:
    body = json.dumps({"model": "smollm2-135m", "temperature": 0, **question}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{URL}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def fleet(key: str) -> dict[str, Any]:
    request = urllib.request.Request(f"{URL}/v1/fleet", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return dict(json.load(answer))


def busy(key: str) -> str:
    """The decode instance that a request runs on, once there is one."""
    while True:
        for one in fleet(key)["instances"]:
            if one["role"] == "decode" and one["num_running"]:
                return str(one["id"])


def start(cluster: Kubelet) -> dict[str, Running]:
    control = cluster.start("phaseplane-control")
    while not control.answers(control.pod.main["livenessProbe"]["httpGet"]):
        assert control.process.poll() is None, control.log.read_text()
    ready_alone = control.is_ready()
    assert not ready_alone, "ready without a node"
    names = ("phaseplane-pool", "phaseplane-prefill", "phaseplane-decode", "phaseplane-console")
    pods = [*(cluster.start(name) for name in names), cluster.start("phaseplane-decode", 1), control]
    for pod in pods:
        cluster.until_ready(pod)
    return {pod.name: pod for pod in pods}


def observe(cluster: Kubelet, key: str) -> dict[str, Any]:
    pods = start(cluster)
    seen: dict[str, Any] = {"xpyd": fleet(key)["xpyd"], "capital": ask(key, CAPITAL), "story": ask(key, COUNT)}
    moved: list[str] = []
    asking = threading.Thread(target=lambda: moved.append(ask(key, COUNT)))
    asking.start()
    leaving = pods[busy(key)]
    hook = leaving.hook(DRAIN_S)
    seen["drain"] = _said(hook)
    seen["ready while drained"] = leaving.is_ready()
    seen["status"] = leaving.stop(within_s=20)
    asking.join(120)
    seen["same story"] = moved == [seen["story"]]
    last = next(pod for name, pod in pods.items() if "decode" in name and pod is not leaving)
    seen["drain of the last"] = _said(last.hook(1))
    seen["inside"] = _said(last.exec(["sh", "-c", INSIDE]))
    seen["stopped"] = {
        name: pod.stop(within_s=30) for name, pod in pods.items() if pod is not leaving and "console" not in name
    }
    return seen


def _said(done: subprocess.CompletedProcess[str]) -> list[Any]:
    return [done.returncode, done.stdout + done.stderr]


def main(directory: Path) -> None:
    keys = directory / "keys"
    make = [sys.executable, str(ROOT / "deploy" / "make_keys.py"), str(keys), "http://phaseplane-control:8000", "/keys"]
    subprocess.run(make, check=True)
    secrets = {f"phaseplane-keys-{kind}": keys / kind for kind in ("control", "nodes", "clients")}
    manifests = Manifests(script("render", HELM).plain(VALUES))
    with kubelet(directory, manifests, secrets) as cluster:
        print(json.dumps(observe(cluster, (keys / "clients" / "api_key").read_text())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
