"""`phaseplane up` without a fleet: command lines, supervision of small real processes, and its refusals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from ui_fakes import Fake, a_fleet, eventually
from ui_kit import SLEEP, a_fleet_plan

from transfer.api import InstanceView
from transfer.errors import InvalidValue
from transfer.models import model_dir
from ui import up, up_command
from ui.errors import CliError
from ui.machine import free_port


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[up.Fleet]:
    """The fleets that `up` would have started; none is."""
    found: list[up.Fleet] = []

    def record(self: up.Fleet):
        found.append(self)
        return asyncio.sleep(0)

    monkeypatch.setattr(up.Fleet, "run", record)
    return found


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


def test_a_port_that_is_found_free_is_none_that_an_outgoing_connection_takes():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = {free_port("127.0.0.1") for _ in range(50)}
    assert not any(low <= port <= high for port in found)
    assert len(found) > 25


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


def run_until_ready(small_fleet: up.Fleet, then: Callable[[], None] = interrupt) -> None:
    thread = after(small_fleet.ready_file.exists, then)
    asyncio.run(small_fleet.run())
    thread.join()


def test_up_tells_where_everything_is_and_ctrl_c_stops_it_all(small_fleet: up.Fleet, tmp_path, capfd):
    found: list[dict[str, object]] = []

    def then() -> None:
        found.append(json.loads((tmp_path / "ready").read_text()))
        interrupt()

    run_until_ready(small_fleet, then)
    out, err = capfd.readouterr()
    assert found[0]["url"] == small_fleet.url
    for word in ("1P1D", "curl -N", "What is the capital of France?", "phaseplane status --url", str(tmp_path)):
        assert word in out
    assert "console" not in out
    assert "stopped" in err
    assert not (tmp_path / "ready").exists()


def test_up_is_ready_when_the_console_can_be_opened(small_fleet: up.Fleet, monkeypatch, capfd):
    small_fleet.console_port = port = free()
    listens_late = (
        f"import socket, time; time.sleep(.5); s = socket.create_server(('127.0.0.1', {port})); time.sleep(60)"
    )
    monkeypatch.setattr(up, "console_argv", lambda *_: [sys.executable, "-c", listens_late])
    answers: list[int] = []

    def then() -> None:
        with socket.socket() as probe:
            answers.append(probe.connect_ex(("127.0.0.1", port)))
        interrupt()

    run_until_ready(small_fleet, then)
    assert answers == [0]
    assert f"console http://127.0.0.1:{port}" in capfd.readouterr().out


def test_up_goes_on_without_a_console_that_does_not_listen(small_fleet: up.Fleet, monkeypatch, capfd):
    small_fleet.console_port = free()
    monkeypatch.setattr(up, "console_argv", lambda *_: [sys.executable, "-c", SLEEP])
    monkeypatch.setattr(up, "CONSOLE_WAIT_S", 0.3)
    run_until_ready(small_fleet)
    out, err = capfd.readouterr()
    assert "the console does not listen after 0.3 s; its log is" in err
    assert "curl -N" in out


def test_up_asks_with_its_own_key_and_does_not_print_it(small_fleet: up.Fleet, fleet: Fake, capfd):
    fleet.api_key = small_fleet.api_key = "a long secret"
    run_until_ready(small_fleet)
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
