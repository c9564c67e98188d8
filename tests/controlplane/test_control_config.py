"""Settings: precedence, aliases, and a sentence for whatever is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane.config import Config, load_config
from transfer.errors import ConfigError
from transfer.terms import Slo

FULL = """
[server]
port = 9000
api_keys = {alice = "sk-alice-1"}
[model]
name = "llama-3.1-8b"
engine = "emulated"
[scheduler]
lease_s = 20
[classes.chat]
ttft_s = 0.5
tpot_s = 0.05
[classes.batch]
[up]
prefill = 3
"""


Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """load(text of the file, variables, section__key="text" from the command line)."""

    def run(text: str = "", environ: dict[str, str] | None = None, **overrides: str) -> Config:
        file = tmp_path / "phaseplane.toml" if text else None
        if file is not None:
            file.write_text(text)
        dotted = {key.replace("__", "."): value for key, value in overrides.items()}
        return load_config(file, environ or {}, dotted)

    return run


def test_defaults_need_nothing(load: Load) -> None:
    config = load()
    assert (config.server.host, config.server.port, config.served_name) == ("127.0.0.1", 8000, "smollm2-135m")
    assert config.core.classes == {"default": Slo(ttft_s=2.0, tpot_s=0.2), "batch": None}
    assert config.state_dir == Path.home() / ".local" / "state" / "phaseplane"


def test_a_file_is_read_and_sections_of_other_programs_are_left_alone(load: Load) -> None:
    config = load(FULL)
    assert (config.server.port, config.model.engine, config.scheduler.lease_s) == (9000, "emulated", 20.0)
    assert config.core.classes == {"chat": Slo(ttft_s=0.5, tpot_s=0.05), "batch": None, "default": None}
    assert config.core.lease_s == 20.0


def test_command_line_over_environment_over_file(load: Load) -> None:
    environ = {"PHASEPLANE_SERVER_PORT": "9001", "PHASEPLANE_WIRE_PORT": "9002", "PHASEPLANE_STATE": "/s", "HOME": "/h"}
    config = load(FULL, environ, server__port="9003")
    assert (config.server.port, config.server.wire_port, str(config.state_dir)) == (9003, 9002, "/s")
    assert load(FULL, environ).server.port == 9001


def test_text_becomes_the_type_of_the_setting(load: Load) -> None:
    environ = {
        "PHASEPLANE_HISTORY_FLIGHT_RECORDER": "false",
        "PHASEPLANE_CLASSES": "{chat = {ttft_s = 1, tpot_s = 0.1}}",
        "PHASEPLANE_SERVER_API_KEYS": '{bob = "sk-bob-12"}',
        "PHASEPLANE_MODEL_MAX_CONTEXT": "512",
    }
    config = load("", environ, classes__fast="{ttft_s = 0.1, tpot_s = 0.01}", server__curve_allowed='["a"]')
    assert config.history.flight_recorder is False
    assert set(config.classes) == {"chat", "fast"}
    assert config.server.api_keys == {"bob": "sk-bob-12"}
    assert config.server.curve_allowed == ("a",)
    assert config.model.max_context == 512


def test_variables_of_other_programs_are_ignored(load: Load) -> None:
    assert load("", {"PHASEPLANE_HOME": "/x", "PHASEPLANE_GRACE_S": "1", "SERVER_PORT": "1"}) == Config()


@pytest.mark.parametrize(
    ("text", "environ", "overrides", "sentence"),
    [
        ("[server]\nprot = 1", {}, {}, "toml sets server.prot, which is not known; did you mean server.port?"),
        ("[sever]\nport = 1", {}, {}, "sets sever, which is not known; did you mean server?"),
        ("server = 1", {}, {}, "it is a section: write [server]"),
        ("[server", {}, {}, "is not TOML"),
        ("[classes.chat]\nttft = 1", {}, {}, "chat.ttft, which is not known; did you mean classes.chat.ttft_s?"),
        ("[classes]\nchat = 1", {}, {}, "sets classes.chat to 1"),
        ("[classes.chat]\nttft_s = 1", {}, {}, "needs both ttft_s and tpot_s"),
        ("[classes.chat]\nttft_s = 0\ntpot_s = 1", {}, {}, "must be above 0 seconds"),
        ("[classes.'a b']\nttft_s = 1\ntpot_s = 1", {}, {}, "letters, digits"),
        ("[scheduler]\nlease_s = 0", {}, {}, "lease_s must be above 0"),
        ("[scheduler]\nheartbeat_s = 5\nlease_s = 20", {}, {}, "twice scheduler.heartbeat_s"),
        ("[scheduler.classes.x]\nttft_s = 1\ntpot_s = 1", {}, {}, "set traffic classes in [classes]"),
        ("", {"PHASEPLANE_SERVER_PROT": "1"}, {}, "variable PHASEPLANE_SERVER_PROT sets server.prot"),
        ("", {}, {"server.prot": "1"}, "the command line sets server.prot"),
        ("", {}, {"server.port": "abc"}, "setting server.port is wrong: expected `int`, got `str`"),
        ("", {}, {"server.port": "70000"}, "from 0 to 65535"),
        ("", {}, {"model.engine": "vllm"}, "setting model.engine is wrong"),
        ("", {}, {"classes": "nonsense"}, "not a TOML value"),
        ("", {}, {"server.host": "0.0.0.0"}, "set server.api_keys, or use 127.0.0.1"),
        ("", {}, {"server.wire_host": "0.0.0.0"}, "set server.curve_key_file, or use 127.0.0.1"),
        ("", {}, {"server.api_keys": '{a = "short"}'}, "shorter than 8"),
        ("", {}, {"limits.max_in_flight": "0"}, "limits.max_in_flight must be above 0"),
        ("", {}, {"limits.header_timeout_s": "0"}, "limits.header_timeout_s must be above 0"),
        ("[limits]\nbody_timeout_s = -1", {}, {}, "limits.body_timeout_s must be above 0"),
        ("", {"PHASEPLANE_LIMITS_MAX_CONNECTIONS": "0"}, {}, "limits.max_connections must be above 0"),
    ],
)
def test_whatever_is_wrong_is_told_in_a_sentence(
    load: Load, text: str, environ: dict[str, str], overrides: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as told:
        load(text, environ, **{key.replace(".", "__"): value for key, value in overrides.items()})
    assert sentence in str(told.value)


def test_a_missing_file_is_told() -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(Path("/nowhere/x.toml"), {}, {})


def test_beyond_loopback_with_keys_is_fine(load: Load) -> None:
    config = load("", {}, server__host="0.0.0.0", server__api_keys='{a = "sk-12345678"}')
    assert config.server.host == "0.0.0.0"
    assert load("", {}, server__host="localhost").server.host == "localhost"
    assert load("", {}, server__host="::1").server.host == "::1"
