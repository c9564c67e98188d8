"""vLLM beside an agent, in a pod or with Compose: started as the agent would start it, as the same user, and with the
same memory. No vLLM is needed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_manifests import PLAIN, ROOT, Manifests

from nodes.engines.vllm.launch import command
from nodes.engines.vllm.link import check_private

PAIRS = ("prefill", "decode")


def flags(arguments: list[str]) -> dict[str, str]:
    """--name=value and --name value alike."""
    found, rest = {}, iter(arguments)
    for argument in rest:
        name, given, value = argument.partition("=")
        assert name.startswith("--"), argument
        alone = name.startswith(("--no-", "--disable-"))
        found[name] = value if given else "" if alone else next(rest)
    return found


def wanted() -> tuple[dict[str, str], dict[str, Any]]:
    """Flags that every vLLM with our connector has, and the connector's settings, as an agent starts one itself."""
    line = command(
        Path("python"), Path("/model"), Path("/socket"), Path("/http"), name="-", dtype="bfloat16", block_size=32,
        max_model_len=None, args=(),
    )  # fmt: skip
    found = flags(line[line.index("/model") + 1 :])
    connector = json.loads(found.pop("--kv-transfer-config"))
    del connector["kv_connector_extra_config"]  # the socket is another, and nobody ends with the agent
    return {name: found[name] for name in found.keys() - {"--uds", "--served-model-name", "--dtype"}}, connector


def check(arguments: list[str], socket: str, dtype: str) -> None:
    found = flags(arguments)
    connector = json.loads(found.pop("--kv-transfer-config"))
    assert connector.pop("kv_connector_extra_config") == {"socket": socket}
    assert (dict(wanted()[0].items() & found.items()), connector) == wanted()
    assert found["--dtype"] == dtype
    assert found["--host"] == "127.0.0.1"


@pytest.mark.parametrize("name", PAIRS)
def test_a_pod_starts_vllm_as_an_agent_would(name: str) -> None:
    pod = Manifests((PLAIN / "h800-h20.yaml").read_text()).pods[f"phaseplane-{name}"]
    copy, vllm = pod.spec["initContainers"]
    options = {one["name"]: one.get("value") for one in pod.main["env"]}
    assert vllm["command"][:3] == ["vllm", "serve", options["PHASEPLANE_MODEL"]]
    check(vllm["command"][3:], options["PHASEPLANE_VLLM_SOCKET"], options["PHASEPLANE_DTYPE"])
    assert options["PHASEPLANE_ENGINE_URL"] == "http://127.0.0.1:8100"
    assert "--port=8100" in vllm["command"]
    assert copy["command"][1:] == [
        next(one["value"] for one in vllm["env"] if one["name"] == "PYTHONPATH"),
        str(Path(options["PHASEPLANE_VLLM_SOCKET"]).parent),
    ]


@pytest.mark.parametrize("name", PAIRS)
def test_in_a_pod_vllm_stops_after_the_agent_and_shares_its_memory_and_user(name: str) -> None:
    pod = Manifests((PLAIN / "h800-h20.yaml").read_text()).pods[f"phaseplane-{name}"]
    copy, vllm = pod.spec["initContainers"]
    assert (vllm["restartPolicy"], "restartPolicy" in copy) == ("Always", False)
    shared = {mount["name"]: mount["mountPath"] for mount in vllm["volumeMounts"]}
    own = {mount["name"]: mount["mountPath"] for mount in pod.main["volumeMounts"]}
    assert {place for place in shared if shared[place] == own.get(place)} == {"shm", "run", "models"}
    assert "runAsUser" not in vllm["securityContext"] | pod.main["securityContext"]
    assert vllm["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in pod.main["resources"]["limits"]


@pytest.mark.parametrize("name", PAIRS)
def test_compose_pairs_each_vllm_with_an_agent(name: str) -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    vllm, agent = services[f"gpu-{name}-vllm"], services[f"gpu-{name}"]
    assert agent["network_mode"] == agent["ipc"] == f"service:gpu-{name}-vllm"
    assert (vllm["ipc"], vllm["user"]) == ("shareable", "10001:10001")
    options = agent["environment"]
    assert options["ROLE"] == name
    assert vllm["entrypoint"][:3] == ["vllm", "serve", options["PHASEPLANE_MODEL"]]
    check(
        [*vllm["entrypoint"][3:], *vllm["command"]], options["PHASEPLANE_VLLM_SOCKET"], options["PHASEPLANE_DTYPE"]
    )  # fmt: skip
    assert f"--block-size={options['PHASEPLANE_BLOCK_SIZE']}" in vllm["entrypoint"]
    copied = services["gpu-files"]["command"][2].split(" && ")[0].split()
    assert vllm["environment"]["PYTHONPATH"] == copied[1]
    assert str(Path(options["PHASEPLANE_VLLM_SOCKET"]).parent) in copied[2:]
    assert any(place.split(":")[1] == "/gpu" for place in vllm["volumes"])


def test_what_vllm_loads_of_ours_is_copied_and_the_socket_is_for_one_user(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for package in ("transfer", "nodes", "torch"):
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").touch()
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "python3").write_text(f"#!/bin/sh\necho {site}\n")
    (tools / "python3").chmod(0o755)
    packages, link = tmp_path / "run" / "packages", tmp_path / "run" / "link"
    run = [str(ROOT / "deploy" / "connector.sh"), str(packages), str(link)]
    for _ in range(2):  # a pod's containers may start again
        subprocess.run(run, check=True, env={"PATH": f"{tools}:/usr/bin:/bin"})
    assert sorted(path.name for path in packages.iterdir()) == ["nodes", "transfer"]
    check_private(link)
