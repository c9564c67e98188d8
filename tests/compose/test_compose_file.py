"""compose.yaml is one that Compose takes and gives nothing away, and programs take the keys made. Needs no engine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from compose_engine import COMPOSE, ROOT, why_no_compose

from controlplane.config import load_config
from nodes.options import parse_options
from transfer.keys import load_data_key
from transfer.wire.curve import load_keys

FILE = ROOT / "compose.yaml"
Given = Callable[..., dict[str, str]]
PROFILES = ("metrics", "fleet", "gpu", "tools")
needs_compose = pytest.mark.skipif(why_no_compose() is not None, reason=why_no_compose() or "")


def config(*arguments: str, file: Path = FILE) -> subprocess.CompletedProcess[str]:
    flags = [flag for profile in PROFILES for flag in ("--profile", profile)]
    command = [COMPOSE, "--file", file, "--project-directory", ROOT, *flags, "config", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    """Every service, as Compose understands it without any variable set."""
    found: dict[str, dict[str, Any]] = json.loads(config("--format", "json").stdout)["services"]
    return found


@needs_compose
def test_compose_takes_the_file_and_refuses_a_typo(tmp_path: Path) -> None:
    assert config("--quiet").stderr == ""
    assert config("--quiet").returncode == 0
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(FILE.read_text().replace("healthcheck:", "healthchek:"))
    assert config("--quiet", file=wrong).returncode != 0


@needs_compose
def test_without_a_profile_it_is_the_small_fleet(services: dict[str, dict[str, Any]]) -> None:
    plain = {name: service.get("scale", 1) for name, service in services.items() if "profiles" not in service}
    assert plain == {"keys": 1, "control": 1, "prefill": 2, "decode": 2, "pool": 1, "console": 1, "load": 1}


@needs_compose
def test_nobody_beyond_this_machine_is_let_in(services: dict[str, dict[str, Any]]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}
    assert len({port["published"] for port in ports}) == len(ports)


@needs_compose
def test_containers_have_no_rights_they_do_not_need(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only") or name == "grafana", name
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), name
        assert "privileged" not in service, name


@needs_compose
def test_each_kind_sees_its_own_keys_alone(services: dict[str, dict[str, Any]]) -> None:
    mounted = {
        name: {volume["source"] for volume in service.get("volumes", ()) if volume["source"].startswith("keys-")}
        for name, service in services.items()
    }
    assert mounted.pop("keys") == {"keys-control", "keys-nodes", "keys-clients"}
    for name, service in services.items():
        if name != "keys":
            assert len(mounted[name]) <= 1, name
            assert all(v.get("read_only") for v in service.get("volumes", ()) if v["source"].startswith("keys-")), name
        if "KEYS" in (service.get("environment") or {}):
            assert f"keys-{service['environment']['KEYS'].split('/')[2]}" in mounted[name], name


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "deploy" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name in ("control", "nodes", "clients"):
        (tmp_path / name).mkdir()
    script("make_keys").make(tmp_path, "http://control:8000")
    return tmp_path


@pytest.fixture
def given(tmp_path: Path) -> Given:
    """The variables a program gets behind the entry point in a container of our naming, without those of this test."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "hostname").write_text('#!/bin/sh\ntest "$*" = -i && echo 172.18.0.7 || echo 3f9a12bc7d10\n')
    (tools / "hostname").chmod(0o755)
    show = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]

    def run(**variables: str) -> dict[str, str]:
        base = {"PATH": f"{tools}:{os.environ['PATH']}", **variables}
        done = subprocess.run(
            ["sh", ROOT / "deploy" / "entrypoint.sh", *show], env=base, capture_output=True, check=True
        )
        return dict(json.loads(done.stdout))

    return run


def test_control_plane_and_nodes_take_the_keys(keys: Path, given: Given) -> None:
    control = given(KEYS=str(keys / "control" / "env"))
    found = load_config(None, control, {"server.host": "0.0.0.0", "server.wire_host": "0.0.0.0"}).server
    node = given(KEYS=str(keys / "nodes" / "env"), NODE="cpu", ROLE="decode")
    options = parse_options(["--control", "tcp://control:8001"], node)
    assert options.curve_key_file is not None
    pair = load_keys(Path(options.curve_key_file), server_public=options.control_public_key)
    assert found.curve_allowed == (pair.public,)
    assert found.curve_key_file is not None
    assert load_keys(Path(found.curve_key_file)).public == pair.server_public
    assert options.data_key_file is not None
    assert load_data_key(Path(options.data_key_file))
    client = given(KEYS=str(keys / "clients" / "env"))
    node_key = (keys / "nodes" / "api_key").read_text()
    assert found.api_keys == {"local": client["PHASEPLANE_API_KEY"], "nodes": node_key}
    assert (keys / "clients" / "api_key").read_text() == client["PHASEPLANE_API_KEY"]
    whole = given(KEYS=str(keys / "control" / "whole-fleet.env"))
    assert whole["PHASEPLANE_SERVER_API_KEYS"] == control["PHASEPLANE_SERVER_API_KEYS"]
    assert "PHASEPLANE_SERVER_CURVE_KEY_FILE" not in whole


def test_a_node_is_called_after_its_container(given: Given) -> None:
    node = parse_options(["--control", "tcp://control:8001"], given(NODE="cpu", ROLE="decode"))
    assert [(one.instance_id, one.role) for one in node.instances] == [("cpu-3f9a12", "decode")]
    assert (node.data_host, node.data_advertise) == ("0.0.0.0", "172.18.0.7")


def test_a_pod_gives_its_name_and_address(given: Given, tmp_path: Path) -> None:
    pod = {"INSTANCE": "phaseplane-decode-5d9c7-x2x4z", "ROLE": "decode", "PHASEPLANE_DATA_ADVERTISE": "10.1.2.3"}
    (tmp_path / "phaseplane-kv-1-a").touch()
    (tmp_path / "else").touch()
    node = parse_options(["--control", "tcp://control:8001"], given(**pod, STALE=f"{tmp_path}/phaseplane-kv-*"))
    assert [(one.instance_id, one.role) for one in node.instances] == [("phaseplane-decode-5d9c7-x2x4z", "decode")]
    assert (node.data_host, node.data_advertise) == ("0.0.0.0", "10.1.2.3")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["else"]


def test_kv_is_received_on_the_network_cards_named(given: Given) -> None:
    pod = {"INSTANCE": "d", "ROLE": "decode", "INTERFACES": "lo", "PHASEPLANE_DATA_ADVERTISE": "10.1.2.3"}
    node = parse_options(["--control", "tcp://control:8001"], given(**pod))
    assert (node.data_host, node.data_advertise) == ("127.0.0.1", None)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        given(**pod | {"INTERFACES": "lo,rail9"})
    assert b"network card 'rail9' has no IPv4 address (No such device); there are lo" in failed.value.stderr


def test_keys_can_be_made_for_another_place(tmp_path: Path) -> None:
    script("make_keys").make(tmp_path / "keys", "http://phaseplane-control:8000", Path("/keys"))
    told = "".join((tmp_path / "keys" / kind / "env").read_text() for kind in ("control", "nodes"))
    named = re.findall(r"KEY_FILE=(.*)", told)
    assert len(named) == 3
    assert all((tmp_path / path.lstrip("/")).is_file() for path in named)


def test_keys_are_made_once_and_are_for_their_owner(keys: Path) -> None:
    before = {path: path.read_text() for path in keys.rglob("*") if path.is_file()}
    assert {path.stat().st_mode & 0o777 for path in before if path.name != "api_key"} == {0o600}
    script("make_keys").make(keys, "http://elsewhere:1")
    assert {path: path.read_text() for path in keys.rglob("*") if path.is_file()} == before
