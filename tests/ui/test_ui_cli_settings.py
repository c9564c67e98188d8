"""Where settings of commands come from: flags, variables, files; and what is in none of them."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest
import typer
from ui_fakes import Fake
from ui_kit import closed_port

from controlplane.config import load_config
from transfer.errors import ConfigError
from ui import cli, options, settings


def test_flag_over_variable_over_file_over_default(run, fleet: Fake, tmp_path, monkeypatch):
    config = tmp_path / "phaseplane.toml"
    config.write_text(f'[client]\nurl = "{fleet.url}"\n[bench]\nnum = 3\nrate = "inf"\noutput-tokens = 3\n')
    report = json.loads(run("bench", "--config", str(config), "--json").out)
    assert report["offered"] == 3
    monkeypatch.setenv("PHASEPLANE_BENCH_NUM", "4")
    assert json.loads(run("bench", "--config", str(config), "--json").out)["offered"] == 4
    assert json.loads(run("bench", "--config", str(config), "--json", "--num", "5").out)["offered"] == 5


def test_a_commands_own_table_wins_over_the_shared_one(run, fleet: Fake, tmp_path):
    config = tmp_path / "phaseplane.toml"
    config.write_text(f'[client]\nurl = "http://127.0.0.1:{closed_port()}"\n[status]\nurl = "{fleet.url}"\n')
    assert run("status", "--config", str(config)).code == 0


def test_unknown_keys_and_variables_name_the_nearest(run, tmp_path, monkeypatch):
    config = tmp_path / "phaseplane.toml"
    config.write_text("[bench]\nnumm = 3\n")
    ran = run("bench", "--config", str(config))
    assert ran.code == 2
    assert "did you mean bench.num?" in ran.err
    config.write_text("bench = 3\n")
    assert "write [bench]" in run("bench", "--config", str(config)).err
    config.write_text("[bench\n")
    assert "is not TOML" in run("bench", "--config", str(config)).err
    monkeypatch.setenv("PHASEPLANE_BENCH_RAT", "3")
    ran = run("bench")
    assert ran.code == 2
    assert "did you mean PHASEPLANE_BENCH_RATE?" in ran.err


def test_a_wrong_value_in_the_file_is_a_sentence(run, tmp_path):
    config = tmp_path / "phaseplane.toml"
    for text, said in (
        ('[bench]\nnum = "many"', "bench.num to 'many'"),
        ("[bench]\nnum = 2.5", "bench.num to 2.5, and that cannot be: a whole number is wanted"),
        ("[bench]\nnum = 0", "bench.num to 0"),
        ("[up]\ndecode = true", "up.decode to true"),
        ('[up]\nno-console = "yes"', "up.no-console to 'yes', and that cannot be: true or false is wanted"),
        ("[up]\nstate = 3", "up.state to 3, and that cannot be: text is wanted"),
        ('[up]\nengine = "sglang"', "up.engine to 'sglang'"),
        ('[server]\nport = "x"', "server.port to 'x'"),
        ("[client]\nurl = 1979-05-27", "client.url to"),
    ):
        config.write_text(text)
        ran = run("status", "--config", str(config))
        assert ran.code == 2
        assert f"{config} sets {said}" in ran.err
        assert "--" not in ran.err


def test_text_lists_and_numbers_that_fit_are_taken(run, tmp_path):
    config = tmp_path / "phaseplane.toml"
    url = f"http://127.0.0.1:{closed_port()}"
    config.write_text(
        f'[client]\nurl = "{url}"\n[bench]\nrate = "inf"\noutput-tokens = 3\nslo = "ttft:2,tpot:1"\n'
        '[up]\nhardware = ["H800", "H20"]\nwait = 5\nno_console = true\n'
    )
    assert "no fleet answers" in run("bench", "--config", str(config)).err


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("PHASEPLANE_DECODES", "PHASEPLANE_DECODE"),
        ("PHASEPLANE_TOKEN_BUDGE", "PHASEPLANE_TOKEN_BUDGET"),
        ("PHASEPLANE_SERVR_PORT", "PHASEPLANE_SERVER_PORT"),
        ("PHASEPLANE_BENCH_RAT", "PHASEPLANE_BENCH_RATE"),
    ],
)
def test_a_variable_of_nobody_is_refused_by_every_command(run, monkeypatch, name, nearest):
    monkeypatch.setenv(name, "2")
    for command in ("up", "status", "bench"):
        ran = run(command)
        assert ran.code == 2
        assert f"variable {name} is not known; did you mean {nearest}?" in ran.err


def test_variables_of_every_program_are_known(run, monkeypatch):
    for name in ("HOME", "GRACE_S", "KVPOOL_PORT", "WIRE_PORT", "SCHEDULER_LEASE_S", "UP_POOL", "POOL", "STATUS_JSON"):
        monkeypatch.setenv(f"PHASEPLANE_{name}", "1")
    assert "no fleet answers" in run("status", "--url", f"http://127.0.0.1:{closed_port()}").err


def test_the_names_of_other_programs_are_theirs():
    from controlplane.config import ALIASES, FOREIGN_SECTIONS
    from controlplane.config import Config as ControlConfig
    from nodes.options import AgentOptions

    assert {field.name for field in dataclasses.fields(AgentOptions)} == set(settings.NODE_VARIABLES)
    assert {*ALIASES, "classes"} == set(settings.CONTROL_VARIABLES)
    assert {field.name for field in msgspec.structs.fields(ControlConfig)} == set(settings.CONTROL_TABLES)
    scopes = {one.scope for one in options.described(typer.main.get_command(cli.app))}
    assert {*scopes, settings.CLIENT_TABLE} == set(FOREIGN_SECTIONS)


def test_a_table_of_nobody_is_refused(run, tmp_path):
    config = tmp_path / "phaseplane.toml"
    config.write_text("[upp]\ndecode = 2\n")
    ran = run("status", "--config", str(config))
    assert ran.code == 2
    assert f"{config} sets upp, which is not known; did you mean [up]?" in ran.err
    with pytest.raises(ConfigError, match=r"did you mean up\?"):
        load_config(config, {}, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[server]\nport = "x"', "{file}: setting server.port is wrong"),
        ('[classes.chat]\nttft_s = "a"', "{file}: setting classes.chat.ttft_s is wrong"),
        ("[server.api_keys]\nbob = 3", "{file}: setting server.api_keys.bob is wrong"),
        ("[scheduler]\nlease_s = 0", "scheduler.lease_s must be above 0"),
    ],
)
def test_the_control_plane_names_file_and_key(tmp_path, text, said):
    file = tmp_path / "phaseplane.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as told:
        load_config(file, {}, {})
    assert said.format(file=file) in str(told.value)
    with pytest.raises(ConfigError, match=r"variable PHASEPLANE_PORT: setting server.port is wrong"):
        load_config(None, {"PHASEPLANE_PORT": "x"}, {})
