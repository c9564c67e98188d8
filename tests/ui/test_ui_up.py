"""`phaseplane up` without a fleet: command lines, supervision of small real processes, and its refusals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from ui_fakes import Fake, a_fleet, eventually

from transfer.api import InstanceView
from transfer.errors import InvalidValue
from transfer.models import model_dir
from ui import launch, processes, up, up_command
from ui.errors import CliError
from ui.launch import FleetPlan, control_argv, groups, members, node_argv, parse_hardware, threads_each
from ui.processes import Child, RotatingLog, Supervisor


def a_fleet_plan(tmp_path: Path, **changes: object) -> FleetPlan:
    values: dict[str, object] = {
        "prefill": 1, "decode": 1, "mixed": 0, "pool": 0, "engine": "native", "model": "tiny",
        "hardware": ("auto", "auto"), "host": "127.0.0.1", "port": 8000, "wire_port": 8001, "state": tmp_path,
    }  # fmt: skip
    return FleetPlan(**(values | changes))  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[up.Fleet]:
    """The fleets that `up` would have started; none is."""
    found: list[up.Fleet] = []

    def record(self: up.Fleet):
        found.append(self)
        return asyncio.sleep(0)

    monkeypatch.setattr(up.Fleet, "run", record)
    return found


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


def test_a_port_in_use_names_it_and_another(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = run("up", "--port", str(port), "--engine", "emulated")
    assert ran.code == 1
    assert f"port {port} on 127.0.0.1 is in use" in ran.err
    assert f"`phaseplane up --port {port + 1}`" in ran.err


def test_refusals_before_anything_starts(run, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(up_command.asyncio, "run", lambda work: (work.close(), started.append(1)))
    assert run("up", "--port", "0", "--prefill", "0", "--decode", "0").code == 2
    ran = run("up", "--port", "0", "--model", str(tmp_path / "nothing"))
    assert ran.code == 1
    assert "`phaseplane pull smollm2-135m`" in ran.err
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "x.safetensors").write_bytes(b"0")
    monkeypatch.setattr(up_command, "available_memory", lambda: 1e9)
    ran = run("up", "--port", "0", "--model", str(model), "--decode", "3")
    assert ran.code == 1
    assert "4 native instances" in ran.err
    assert "1.0 GB are available" in ran.err
    assert run("up", "--port", "0", "--speed", "-1").code == 2
    assert started == []


def test_up_reads_the_control_planes_own_tables(run, tmp_path, monkeypatch, seen):
    config = tmp_path / "phaseplane.toml"
    port = free()
    config.write_text(
        f'[server]\nport = {port}\n[model]\nengine = "emulated"\n'
        f'[history]\ndirectory = "{tmp_path}/s"\n[up]\npool = 2\n'
    )
    assert run("up", "--config", str(config)).code == 0
    plan = seen[0].plan
    assert (plan.port, plan.engine, plan.pool, plan.state) == (port, "emulated", 2, tmp_path / "s")
    monkeypatch.setenv("PHASEPLANE_POOL", "3")
    assert run("up", "--config", str(config)).code == 0
    assert seen[1].plan.pool == 3
    assert run("up", "--config", str(config), "--pool", "4").code == 0
    assert seen[2].plan.pool == 4


def test_the_whole_example_of_the_docs_starts_a_fleet_that_up_can_ask(run, tmp_path, monkeypatch, seen):
    monkeypatch.setattr(up_command, "_have_model", lambda model: None)
    monkeypatch.setattr(up_command, "_stored_dtype", lambda model: "float32")
    monkeypatch.setattr(up_command, "_check_memory", lambda plan: None)
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    config = tmp_path / "phaseplane.toml"
    config.write_text(text.partition("```toml\n")[2].partition("```")[0])
    arguments = ("up", "--config", str(config), "--port", "0", "--state", str(tmp_path / "s"))
    ran = run(*arguments)
    assert ran.code == 0, ran.err
    assert (seen[0].plan.prefill, seen[0].plan.engine, seen[0].api_key) == (2, "native", "a long secret")
    monkeypatch.setenv("PHASEPLANE_SERVER_API_KEYS", '{bob = "another secret"}')
    assert run(*arguments).code == 0
    assert seen[1].api_key == "another secret"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nliveness_s = 0.1", "server.liveness_s must be at least twice"),
        ('[server]\nwire_host = "0.0.0.0"', "set server.curve_key_file"),
        ('[server]\ncurve_key_file = "/nowhere/control.key"', "cannot read the key file /nowhere/control.key"),
        ('[scheduler]\nlease_s = "soon"', "setting scheduler.lease_s is wrong"),
        ("[limits]\nmax_inflight = 3", "did you mean limits.max_in_flight?"),
    ],
)
def test_a_wrong_configuration_is_told_before_anything_starts_and_by_doctor(run, tmp_path, monkeypatch, text, said):
    monkeypatch.setattr(up.Fleet, "run", lambda self: pytest.fail("the fleet was started"))
    config = tmp_path / "phaseplane.toml"
    config.write_text(text)
    ran = run("up", "--config", str(config), "--port", "0", "--engine", "emulated", "--state", str(tmp_path / "s"))
    assert ran.code == 2
    assert said in ran.err
    assert f"nothing was started: mend {config}" in ran.err
    assert "doctor" not in ran.err
    ran = run("doctor", "--config", str(config), "--json")
    finding = next(one for one in json.loads(ran.out) if one["name"] == "configuration")
    assert ran.code == 1
    assert finding["level"] == "fail"
    assert said in finding["text"]
    assert str(config) in finding["mend"]


def test_a_wrong_variable_is_told_before_anything_starts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(up.Fleet, "run", lambda self: pytest.fail("the fleet was started"))
    monkeypatch.setenv("PHASEPLANE_SERVER_PROT", "1")
    ran = run("up", "--port", "0", "--engine", "emulated", "--state", str(tmp_path / "s"))
    assert ran.code == 2
    assert "did you mean server.port?" in ran.err


def test_a_context_beyond_the_models_is_found_by_check(tmp_path, capfd):
    from controlplane.main import EXIT_CONFIG, main

    model = tmp_path / "tiny"
    model.mkdir()
    config = tmp_path / "phaseplane.toml"
    config.write_text(f'[model]\nname = "{model}"\nmax_context = 99999999\n')
    assert main(["--config", str(config), "--check"]) == 0  # no model there yet: it may be pulled later
    config.write_text('[model]\nname = "smollm2-135m"\nmax_context = 99999999\n')
    if not is_pulled("smollm2-135m"):
        pytest.skip("the weights are not here")
    assert main(["--config", str(config), "--check"]) == EXIT_CONFIG
    assert "model.max_context 99999999 is over" in capfd.readouterr().err


def test_a_stale_ready_file_is_removed_at_the_start(run, tmp_path, monkeypatch):
    there: list[bool] = []
    ready = tmp_path / "ready"
    ready.write_text("{}")

    def record(self: up.Fleet):
        there.append(ready.exists())
        return asyncio.sleep(0)

    monkeypatch.setattr(up.Fleet, "run", record)
    monkeypatch.setattr(up_command, "control_fault", lambda argv: there.append(ready.exists()))
    command = ("up", "--port", "0", "--engine", "emulated", "--state", str(tmp_path / "s"))
    assert run(*command, "--ready-file", str(ready)).code == 0
    assert there == [False, False]


def test_weights_run_in_the_dtype_they_are_kept_in(run, tmp_path, seen):
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    command = ("up", "--port", "0", "--model", str(tmp_path), "--state", str(tmp_path / "s"))
    assert run(*command).code == 0
    assert run(*command, "--dtype", "float32").code == 0
    (tmp_path / "config.json").write_text("{}")
    assert run(*command).code == 0
    assert [fleet.plan.dtype for fleet in seen] == ["bfloat16", "float32", None]


def test_one_state_directory_has_one_fleet(tmp_path):
    with up.own_state(tmp_path), pytest.raises(CliError, match="another fleet uses"), up.own_state(tmp_path):
        pass
    with up.own_state(tmp_path):
        assert (tmp_path / "up.lock").exists()


def is_pulled(model: str) -> bool:
    try:
        model_dir(model)
    except InvalidValue:
        return False
    return True


def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def child(tmp_path: Path, program: str, name: str = "it", **more: object) -> Child:
    return Child(name, [sys.executable, "-c", program], tmp_path / f"{name}.log", **more)  # type: ignore[arg-type]


async def until(holds: Callable[[], bool]) -> None:
    assert await asyncio.to_thread(eventually, holds, 10.0)


SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


async def test_a_killed_child_starts_again_and_it_says_so(tmp_path):
    said: list[str] = []
    recalled: list[str] = []

    async def recall(dead: Child) -> None:
        recalled.append(dead.name)

    supervisor = Supervisor(said.append, recall)
    supervisor.may_restart = True
    one = child(tmp_path, SLEEP)
    await supervisor.start(one)
    first = one.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: one.pid != first)
    assert "killed by SIGKILL" in said[0]
    assert recalled == ["it"]
    second = one.pid
    await supervisor.stop()
    assert second is not None
    assert not is_alive(second)


async def test_a_child_that_keeps_dying_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "MAX_RESTARTS", 2)
    monkeypatch.setattr(processes, "FIRST_BACKOFF_S", 0.01)
    said: list[str] = []
    supervisor = Supervisor(said.append)
    supervisor.may_restart = True
    program = "import sys; print('noise'); print('error: it is broken', file=sys.stderr); sys.exit(3)"
    await supervisor.start(child(tmp_path, program, essential=True))
    async with asyncio.timeout(20):
        dead, code = await supervisor.gave_up
    assert (dead.name, code, dead.last_word) == ("it", 3, "it is broken")
    assert len(said) == 3
    assert "it is broken" in said[-1]
    assert (tmp_path / "it.log").read_text().count("noise") == 3
    await supervisor.stop()


async def test_a_child_that_dies_while_starting_ends_the_start(tmp_path):
    supervisor = Supervisor(lambda _: None)
    await supervisor.start(child(tmp_path, "raise SystemExit(4)"))
    async with asyncio.timeout(10):
        _, code = await supervisor.first_death
    assert code == 4
    await supervisor.stop()


async def test_stop_kills_what_ignores_it(tmp_path):
    supervisor = Supervisor(lambda _: None)
    one, two = child(tmp_path, STUBBORN, "one"), child(tmp_path, SLEEP, "two")
    await supervisor.start(one)
    await supervisor.start(two)
    await until(lambda: bool(one.last_lines))
    pids = [one.pid, two.pid]
    began = time.monotonic()
    await supervisor.stop(grace_s=0.3)
    assert time.monotonic() - began < 5
    assert not any(is_alive(pid) for pid in pids if pid is not None)


def test_children_die_with_a_killed_parent(tmp_path):
    program = (
        "import asyncio, sys, pathlib\n"
        "from ui.processes import Child, Supervisor\n"
        "async def main():\n"
        "    s = Supervisor(print)\n"
        f"    c = Child('it', [sys.executable, '-c', {SLEEP!r}], pathlib.Path({str(tmp_path)!r}) / 'it.log')\n"
        "    await s.start(c)\n"
        "    print(c.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    assert eventually(lambda: not is_alive(pid))


def test_a_log_is_bounded_by_two_files(tmp_path):
    log = RotatingLog(tmp_path / "x.log", max_bytes=100)
    for number in range(50):
        log.write(b"line %03d\n" % number)
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200
    assert (tmp_path / "x.log").read_text().endswith("line 049\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log", "x.log.1"]


@pytest.fixture
def small_fleet(fleet: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> up.Fleet:
    """A fleet whose programs only sleep, with the fake in the control plane's place."""
    monkeypatch.setattr(up, "control_argv", lambda plan: [sys.executable, "-c", SLEEP])
    monkeypatch.setattr(up, "node_argv", lambda *_: [sys.executable, "-c", SLEEP])
    plan = a_fleet_plan(tmp_path, hardware=("cpu", "cpu"), port=int(fleet.url.rpartition(":")[2]))
    return up.Fleet(plan, wait_s=20.0, ready_file=tmp_path / "ready")


def after(holds: Callable[[], bool], then: Callable[[], None]) -> threading.Thread:
    def wait() -> None:
        eventually(holds, 10.0)
        then()  # in any case, so that a test that fails also ends

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_up_tells_where_everything_is_and_ctrl_c_stops_it_all(small_fleet: up.Fleet, tmp_path, capfd):
    found: list[dict[str, object]] = []

    def then() -> None:
        found.append(json.loads((tmp_path / "ready").read_text()))
        interrupt()

    thread = after((tmp_path / "ready").exists, then)
    asyncio.run(small_fleet.run())
    thread.join()
    out, err = capfd.readouterr()
    assert found[0]["url"] == small_fleet.url
    for word in ("1P1D", "curl -N", "What is the capital of France?", "phaseplane status --url", str(tmp_path)):
        assert word in out
    assert "console" not in out
    assert "stopped" in err
    assert not (tmp_path / "ready").exists()


def test_up_asks_with_its_own_key_and_does_not_print_it(small_fleet: up.Fleet, fleet: Fake, tmp_path, capfd):
    fleet.api_key = small_fleet.api_key = "a long secret"
    thread = after((tmp_path / "ready").exists, interrupt)
    asyncio.run(small_fleet.run())
    thread.join()
    out, err = capfd.readouterr()
    assert '-H "Authorization: Bearer $PHASEPLANE_API_KEY"' in out
    assert "set PHASEPLANE_API_KEY to a secret of server.api_keys" in out
    assert "a long secret" not in out + err


def test_up_fails_with_the_childs_own_sentence(small_fleet: up.Fleet, fleet: Fake, monkeypatch):
    fleet.fleet = a_fleet(instances=())
    program = "import sys; sys.exit('phaseplane node: model tiny is not here; run `phaseplane pull tiny`')"
    monkeypatch.setattr(up, "node_argv", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(CliError, match=r"did not start .*model tiny is not here; run `phaseplane pull tiny`"):
        asyncio.run(small_fleet.run())


def test_up_names_the_instances_that_never_came(small_fleet: up.Fleet, fleet: Fake):
    lone = InstanceView(id="cpu-0", role="prefill", state="ready", hardware="CPU", model="tiny", epoch=1)
    fleet.fleet = a_fleet(instances=(lone,))
    small_fleet.wait_s = 1.5
    with pytest.raises(CliError, match=r"1 of 2 instances \(cpu-1\) do not serve"):
        asyncio.run(small_fleet.run())


def test_a_node_that_starts_again_takes_its_last_role(small_fleet: up.Fleet, fleet: Fake, tmp_path, monkeypatch):
    asked: list[dict[str, str] | None] = []

    def argv(plan, group, threads, pid, roles=None) -> list[str]:
        asked.append(roles)
        return [sys.executable, "-c", SLEEP]

    monkeypatch.setattr(up, "node_argv", argv)
    moved = tuple(
        InstanceView(id=f"cpu-{i}", role="decode", state="ready", hardware="CPU", model="tiny", epoch=1)
        for i in range(2)
    )
    fleet.fleet = a_fleet(instances=moved)

    def kill_a_node() -> None:
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = entry.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid() and int(entry.parent.name) != os.getpid():
                os.kill(int(entry.parent.name), signal.SIGKILL)

    told: list[str] = []
    monkeypatch.setattr(up, "say", told.append)

    def nodes_back() -> list[str]:
        return [line for line in told if line.startswith("cpu-") and "is back" in line]

    early: list[str] = []

    def all_return() -> None:
        seen_before = len(fleet.asked)
        eventually(lambda: len(fleet.asked) > seen_before + 4)  # it has looked at the lives that had ended
        early.extend(nodes_back())
        fleet.fleet = a_fleet(instances=tuple(msgspec.structs.replace(view, epoch=2) for view in moved))

    killer = after((tmp_path / "ready").exists, kill_a_node)
    returner = after(lambda: any(roles for roles in asked), all_return)
    ender = after(lambda: bool(nodes_back()), interrupt)
    asyncio.run(small_fleet.run())
    for thread in (killer, returner, ender):
        thread.join()
    assert {"cpu-0": "decode", "cpu-1": "decode"} in asked
    assert not early  # the fleet still showed the lives that had ended
    assert nodes_back()[0].endswith("is back, serving decode")


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
    argv = control_argv(plan)
    assert argv[argv.index("--engine") + 1] == "native"
    node = node_argv(plan, members(plan)[:1], 2, 1)
    assert node[node.index("--engine") + 1] == "vllm"
    assert node[node.index("--vllm-python") + 1] == "/opt/v/bin/python"
    assert node[node.index("--vllm-args") + 1] == "--enforce-eager"
