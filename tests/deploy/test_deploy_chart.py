"""The chart renders by Helm's own engine; what it renders Kubernetes takes, gives nothing away, and starts programs
that take what they are told. No cluster is needed."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from deploy_manifests import HELM, PLAIN, Manifest, Manifests, mebibytes, script
from kubernetes_validate import utils as schemas

from controlplane.config import ALIASES, load_config
from nodes.options import AgentOptions, parse_options

render = script("render", HELM)
NAMES = tuple(render.VALUES)
KUBERNETES = ("1.29", "1.37")
NO_SCHEMA = {"ServiceMonitor"}
"""The Prometheus operator's own kind."""
FOLDERS = {"control": "/keys/control", "nodes": "/keys/nodes", "clients": "/keys/clients"}


@pytest.fixture(autouse=True)
def _schemas_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "schema_contents", _contents)


_contents = functools.cache(schemas.schema_contents)


@functools.cache
def rendered(name: str) -> Manifests:
    return Manifests(render.plain(render.values_of(render.VALUES[name])))


def given(**values: Any) -> Manifests:
    return Manifests(render.plain(values))


@pytest.fixture(params=NAMES)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return rendered(request.param)


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_files_are_the_chart(name: str) -> None:
    made = render.plain(render.values_of(render.VALUES[name]))
    assert (PLAIN / f"{name}.yaml").read_text() == made, "run python deploy/helm/render.py"


def test_helm_finds_nothing_to_mend() -> None:
    report = helm_python.lint(render.CHART, strict=True)
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"] if one["severity"] > 1] == []


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_manifest(manifests: Manifests, version: str) -> None:
    for one in manifests.all:
        assert one["kind"] not in NO_SCHEMA
        kubernetes_validate.validate(one, version, strict=True)


def test_a_manifest_with_a_typo_would_be_found() -> None:
    (wrong,) = rendered("cpu").kind("StatefulSet").keys() & {"phaseplane-pool"}
    manifest = yaml.safe_load(yaml.safe_dump(rendered("cpu").kind("StatefulSet")[wrong]))
    manifest["spec"]["template"]["spec"]["containers"][0]["readinessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinessprobe"):
        kubernetes_validate.validate(manifest, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"engins": {}}, "additional properties 'engins' not allowed"),
        ({"engines": {"a": {"role": "kv_pool", "replicas": 1}}}, "/engines/a/role"),
        ({"engines": {"a": {"role": "prefill"}}}, "missing property 'replicas'"),
        ({"engines": {"control": {"role": "prefill", "replicas": 1}}}, "invalid propertyName 'control'"),
        ({"engines": {"decode": {"gpus": 2}}}, "engines.decode: the native engine uses one GPU, got gpus 2"),
        ({"engines": {"decode": {"engine": "vllm"}}}, "engines.decode: vLLM needs one GPU or more, got gpus 0"),
        ({"engines": {"decode": {"engine": "openai", "url": "http://x"}}}, "joined by URL needs url and role mixed"),
        ({"engines": {"decode": {"env": {"PATH": "/"}}}}, "invalid propertyName 'PATH'"),
        ({"pools": {"decode": {"replicas": 1}}}, "engines and pools both have a group decode"),
        ({"model": {"name": "/data/llama", "volume": {"emptyDir": {}}}}, "does not match pattern '^/models/'"),
        ({"model": {"name": "/models/llama"}}, "/model/volume"),
        ({"vllm": {"image": {"tag": "latest"}}}, "/vllm/image/tag"),
    ],
)
def test_wrong_values_are_refused_with_their_name(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(sentence)):
        render.render(values)


def test_containers_have_no_rights_they_do_not_need(manifests: Manifests) -> None:
    for name, pod in manifests.pods.items():
        assert pod.spec["automountServiceAccountToken"] is False, name
        assert pod.spec["securityContext"]["runAsNonRoot"], name
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert re.search(r":v?\d+\.\d+\.\d+", container["image"]), name
            assert "memory" in container["resources"]["limits"], name


def test_services_do_not_become_settings(manifests: Manifests) -> None:
    """A Service called phaseplane would set PHASEPLANE_PORT to a URL in every pod."""
    assert "phaseplane" in manifests.kind("Service")
    assert {pod.spec["enableServiceLinks"] for pod in manifests.pods.values()} == {False}


def test_each_kind_sees_its_own_keys_alone(manifests: Manifests) -> None:
    for name, pod in manifests.pods.items():
        kind = {"phaseplane-control": "control", "phaseplane-console": "clients"}.get(name, "nodes")
        assert pod.secrets == {f"phaseplane-keys-{kind}"}, name
        for container in pod.containers:
            keys = [mount for mount in container.get("volumeMounts", ()) if mount["name"] == "keys"]
            assert keys == (
                [{"name": "keys", "mountPath": FOLDERS[kind], "readOnly": True}] if container == pod.main else []
            ), name


def test_every_mount_has_its_volume(manifests: Manifests) -> None:
    configs = manifests.kind("ConfigMap")
    for name, pod in manifests.pods.items():
        volumes = {volume["name"] for volume in pod.spec["volumes"]} | set(pod.claims)
        mounted = {mount["name"] for container in pod.containers for mount in container["volumeMounts"]}
        assert mounted == volumes, name
        assert {v["configMap"]["name"] for v in pod.spec["volumes"] if "configMap" in v} <= configs.keys(), name


def test_selectors_mean_whom_they_should(manifests: Manifests) -> None:
    nodes = {name for name, pod in manifests.pods.items() if pod.labels.get("app.kubernetes.io/component") == "node"}
    for kind in ("Deployment", "StatefulSet"):
        for name, one in manifests.kind(kind).items():
            assert manifests.meant(one["spec"]["selector"]) == {name}
    for name, one in manifests.kind("Service").items():
        assert manifests.meant(one["spec"]["selector"]) == {"phaseplane-control" if name == "phaseplane" else name}
    budgets = manifests.kind("PodDisruptionBudget")
    assert set(budgets) == nodes
    for name, one in budgets.items():
        assert manifests.meant(one["spec"]["selector"]) == {name}
        assert one["spec"]["maxUnavailable"] == 1


def test_nodes_find_a_control_plane_that_is_not_ready_clients_do_not(manifests: Manifests) -> None:
    services = manifests.kind("Service")
    assert services["phaseplane-control"]["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in services["phaseplane"]["spec"]
    assert [port["port"] for port in services["phaseplane"]["spec"]["ports"]] == [8000]


def test_only_nodes_reach_nodes(manifests: Manifests) -> None:
    everybody = set(manifests.pods)
    nodes = everybody - {"phaseplane-control", "phaseplane-console"}
    assert manifests.may_reach("phaseplane-control", 8001) == nodes
    assert manifests.may_reach("phaseplane-control", 8000) == everybody
    for node in nodes:
        assert manifests.may_reach(node, 34567) == nodes
    assert manifests.may_reach("phaseplane-console", 8501) == {"phaseplane-control"}


def test_without_clients_nobody_is_let_in() -> None:
    closed = given(networkPolicy={"clients": []})
    assert "ingress" not in closed.kind("NetworkPolicy")["phaseplane-console"]["spec"]


def test_a_server_is_joined_by_its_url_and_may_be_reached() -> None:
    engines = {"joined": {"role": "mixed", "replicas": 1, "engine": "openai", "url": "http://10.2.0.9:30000"}}
    server = {"ipBlock": {"cidr": "10.2.0.9/32"}}
    joined = given(engines=engines, networkPolicy={"upstreams": [server]})
    assert {"to": [server]} in joined.kind("NetworkPolicy")["phaseplane-nodes"]["spec"]["egress"]
    assert options_of(joined, "phaseplane-joined").engine_url == "http://10.2.0.9:30000"


def test_a_group_is_taken_out_by_null() -> None:
    mixed = given(engines={"prefill": None, "decode": None, "all": {"role": "mixed", "replicas": 2}})
    assert set(mixed.pods) == {f"phaseplane-{name}" for name in ("control", "console", "all", "pool")}


def test_a_group_may_serve_another_model() -> None:
    weights = {"name": "/models/a", "volume": {"hostPath": {"path": "/data/models"}}}
    second = {"role": "mixed", "replicas": 1, "model": "/models/b"}
    two = given(model=weights, engines={"second": second}, engineDefaults={"engine": "vllm", "gpus": 1})
    models = {name: options_of(two, f"phaseplane-{name}").model for name in ("decode", "second", "pool")}
    assert models == {"decode": "/models/a", "second": "/models/b", "pool": "/models/a"}
    assert two.pods["phaseplane-second"].spec["initContainers"][1]["command"][2] == "/models/b"


def options_of(manifests: Manifests, workload: str) -> AgentOptions:
    container = manifests.pods[workload].main
    environ = variables(container)
    environ["PHASEPLANE_INSTANCES"] = f"{environ['INSTANCE']}={environ['ROLE']}"
    return parse_options(container["command"][4:], environ)


def variables(container: Manifest) -> dict[str, str]:
    """As a pod would have them that is called like this, at this address."""
    fields = {"metadata.name": "phaseplane-decode-5d9c7-x2x4z", "status.podIP": "10.1.2.3"}
    return {
        one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for one in container["env"]
    }


def test_the_control_plane_takes_its_settings(manifests: Manifests, tmp_path: Path) -> None:
    container = manifests.pods["phaseplane-control"].main
    toml = tmp_path / "phaseplane.toml"
    toml.write_text(manifests.kind("ConfigMap")["phaseplane-control"]["data"]["phaseplane.toml"])
    flags = dict(flag.removeprefix("--").split("=") for flag in container["command"] if flag.startswith("--"))
    assert flags.pop("config") == "/etc/phaseplane/phaseplane.toml"
    environ = variables(container) | {"PHASEPLANE_SERVER_API_KEYS": '{ a = "a secret!" }'}
    environ |= {"PHASEPLANE_SERVER_CURVE_KEY_FILE": "/keys/control/control.key"}
    config = load_config(toml, environ, {ALIASES[name.replace("-", "_")]: value for name, value in flags.items()})
    assert config.history.directory == "/var/lib/phaseplane/state"
    assert config.served_name in ("smollm2-135m", "qwen3-14b")


def test_agents_take_their_options(manifests: Manifests) -> None:
    for name, pod in manifests.pods.items():
        if pod.labels.get("app.kubernetes.io/component") != "node":
            continue
        options, environ = options_of(manifests, name), variables(pod.main)
        assert options.control == "tcp://phaseplane-control:8001"
        claimed = mebibytes(pod.main["resources"]["limits"]["memory"])
        assert options.kv_gib is not None
        assert options.kv_gib * 1024 < mebibytes(pod.volume("shm")["emptyDir"]["sizeLimit"])
        assert options.kv_gib * 1024 < claimed
        assert ("INTERFACES" in environ) != ("PHASEPLANE_DATA_ADVERTISE" in environ)


def test_instances_hand_over_before_they_stop(manifests: Manifests) -> None:
    for name, one in manifests.kind("Deployment").items():
        if name == "phaseplane-console":
            continue
        pod = manifests.pods[name]
        command = pod.main["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:4] == ["python3", "-IS", "/opt/phaseplane/drain.py", "/keys/nodes/api_key"]
        assert pod.spec["terminationGracePeriodSeconds"] >= int(command[4]) + 30
        assert one["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_vllm_splits_the_model_over_the_gpus_it_is_given() -> None:
    groups = {"prefill": {"gpus": 4}, "decode": {"gpus": 1}}
    pods = given(engineDefaults={"engine": "vllm"}, engines=groups).pods
    for group, said in (("prefill", ["--tensor-parallel-size=4"]), ("decode", [])):
        vllm = pods[f"phaseplane-{group}"].spec["initContainers"][1]
        assert [one for one in vllm["command"] if "parallel" in one] == said
        assert vllm["resources"]["limits"]["nvidia.com/gpu"] == groups[group]["gpus"]


def test_on_the_machines_own_network_a_port_is_taken_once() -> None:
    values = {"engineDefaults": {"engine": "vllm", "gpus": 1, "hostNetwork": True}}
    vllm = given(**values).pods["phaseplane-decode"].spec["initContainers"][1]
    assert vllm["ports"] == [{"containerPort": 8100}]


def test_a_monitor_scrapes_with_the_clients_key() -> None:
    manifests = given(serviceMonitor={"enabled": True, "labels": {"release": "prometheus"}})
    (monitor,) = manifests.kind("ServiceMonitor").values()
    wanted = monitor["spec"]["selector"]["matchLabels"]
    scraped = [
        name for name, one in manifests.kind("Service").items() if wanted.items() <= one["metadata"]["labels"].items()
    ]
    assert scraped == ["phaseplane-control"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["endpoints"][0]["authorization"]["credentials"] == {
        "name": "phaseplane-keys-clients",
        "key": "api_key",
    }
