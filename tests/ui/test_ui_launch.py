"""What `up` would start: ids, processes, command lines; and what is no fleet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ui_kit import a_fleet_plan

from ui import launch
from ui.errors import CliError
from ui.launch import control_argv, groups, members, node_argv, parse_hardware, threads_each


def test_ids_name_hardware_and_not_the_role(tmp_path):
    plan = a_fleet_plan(tmp_path, prefill=2, decode=1, pool=1, engine="emulated", hardware=("H800", "H20"))
    assert [(m.instance_id, m.role, m.hardware) for m in members(plan)] == [
        ("h800-0", "prefill", "H800"),
        ("h800-1", "prefill", "H800"),
        ("h20-0", "decode", "H20"),
        ("pool-0", "kv_pool", "CPU"),
    ]
    same = members(a_fleet_plan(tmp_path, hardware=("H800", "H800")))
    assert [m.instance_id for m in same] == ["h800-0", "h800-1"]


def test_emulated_instances_share_processes_and_native_ones_do_not(tmp_path):
    plan = a_fleet_plan(tmp_path, prefill=32, decode=32, pool=4, engine="emulated", hardware=("H800", "H20"))
    sizes = [len(group) for group in groups(plan, members(plan))]
    assert sum(sizes) == 68
    assert max(sizes) <= launch.EMULATED_PER_PROCESS
    native = a_fleet_plan(tmp_path, prefill=2, decode=1)
    assert [len(group) for group in groups(native, members(native))] == [1, 1, 1]
    assert threads_each(native, 8) == 2
    assert threads_each(native, 2) == 1


def test_command_lines_are_what_the_programs_read(tmp_path):
    from nodes.options import parse_options

    plan = a_fleet_plan(tmp_path, engine="emulated", hardware=("H800", "H20"), speed=2.0, kv_gib=0.5)
    fleet = members(plan)
    argv = node_argv(plan, fleet, 1, 77, {"h800-0": "decode"})
    options = parse_options(argv[argv.index("nodes.agent") + 1 :], {})
    assert [(one.instance_id, one.role.value, one.hardware) for one in options.instances] == [
        ("h800-0", "decode", "H800"),
        ("h20-0", "decode", "H20"),
    ]
    assert (options.control, options.engine, options.model) == ("tcp://127.0.0.1:8001", "emulated", "tiny")
    assert (options.parent_pid, options.speed, options.kv_gib) == (77, 2.0, 0.5)
    assert options.ssd_dir is None
    pooled = a_fleet_plan(tmp_path, engine="emulated", pool=1, ssd_gib=4.0)
    argv = node_argv(pooled, members(pooled), 1, 77)
    options = parse_options(argv[argv.index("nodes.agent") + 1 :], {})
    assert (options.ssd_dir, options.ssd_gib) == (str(pooled.state / "ssd"), 4.0)
    argv = control_argv(a_fleet_plan(tmp_path, config=tmp_path / "c.toml"))
    assert argv[argv.index("--port") + 1] == "8000"
    assert argv[argv.index("--config") + 1].endswith("c.toml")


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"decode": 0}, "--decode 1"), ({"prefill": 5000}, "more than 1024"), ({"pool": -1}, "--pool must be")],
)
def test_a_fleet_that_cannot_serve_is_refused(tmp_path, changes, said):
    with pytest.raises(CliError, match=said):
        members(a_fleet_plan(tmp_path, **changes))


def test_hardware_classes_parse():
    assert parse_hardware("", "emulated") == ("H800", "H20")
    assert parse_hardware("", "native") == ("auto", "auto")
    assert parse_hardware("H100", "emulated") == ("H100", "H100")
    with pytest.raises(CliError, match="like H800,H20"):
        parse_hardware("a,b,c", "emulated")


def test_servers_join_by_url_beside_what_is_started(tmp_path):
    plan = a_fleet_plan(
        tmp_path, prefill=0, decode=0, joined=("http://127.0.0.1:8080", "https://gpu:8000/v1@H20"), dtype="float32"
    )
    one, other = members(plan)
    assert (one.instance_id, one.role, one.hardware, one.url) == ("url-0", "mixed", "auto", "http://127.0.0.1:8080")
    assert (other.instance_id, other.hardware, other.url) == ("url-1", "H20", "https://gpu:8000/v1")
    assert groups(plan, [one, other]) == [[one], [other]]
    argv = node_argv(plan, [other], 2, 1)
    assert argv[argv.index("--engine") + 1] == "openai"
    assert argv[argv.index("--engine-url") + 1] == "https://gpu:8000/v1"
    assert "--dtype" not in argv, "its numbers are its own"
    assert "url-1=mixed@H20" in argv
    with pytest.raises(CliError, match="--engine emulated has none"):
        members(a_fleet_plan(tmp_path, engine="emulated", hardware=("H20", "H20"), joined=("http://127.0.0.1:1",)))


def test_a_fleet_of_vllm_is_real_to_the_control_plane(tmp_path):
    plan = a_fleet_plan(tmp_path, engine="vllm", vllm_python=Path("/opt/v/bin/python"), vllm_args="--enforce-eager")
    plan = replace(plan, engine_start_s=900.0)
    argv = control_argv(plan)
    assert argv[argv.index("--engine") + 1] == "native"
    node = node_argv(plan, members(plan)[:1], 2, 1)
    assert node[node.index("--engine") + 1] == "vllm"
    assert node[node.index("--vllm-python") + 1] == "/opt/v/bin/python"
    assert node[node.index("--vllm-args") + 1] == "--enforce-eager"
    assert node[node.index("--engine-start-s") + 1] == "900", "as long as `up` waits"
