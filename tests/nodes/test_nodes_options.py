"""What an agent is told: flags before variables before defaults, and a sentence for everything it cannot read."""

from __future__ import annotations

import pytest

from nodes.agent import NodeAgent
from nodes.making import engine_maker
from nodes.options import AgentOptions, parse_options
from transfer.errors import ConfigError, InvalidValue
from transfer.kv.arena import HostArena
from transfer.kv.links.tcp import TcpKvPort
from transfer.terms import KvLayout, Role

BASE = ["--control", "tcp://127.0.0.1:5555", "--instance", "d0=decode"]


def test_flags_win_over_variables_and_variables_over_defaults() -> None:
    environ = {"PHASEPLANE_TOKEN_BUDGET": "512", "PHASEPLANE_SPEED": "inf", "PHASEPLANE_PREFIX_CACHE": "no"}
    options = parse_options([*BASE, "--token-budget", "64"], environ)
    assert (options.token_budget, options.speed, options.prefix_cache) == (64, float("inf"), False)
    assert options.max_running == AgentOptions.__dataclass_fields__["max_running"].default


def test_instances_from_flags_and_from_the_environment() -> None:
    many = ["--control", "tcp://127.0.0.1:1", "--engine", "emulated", "--instance", "p0=prefill@H800"]
    options = parse_options([*many, "--instance", "k0=kv_pool"], {})
    assert [(i.instance_id, i.role, i.hardware) for i in options.instances] == [
        ("p0", Role.PREFILL, "H800"),
        ("k0", Role.KV_POOL, None),
    ]
    environ = {
        "PHASEPLANE_CONTROL": "tcp://127.0.0.1:1", "PHASEPLANE_INSTANCES": "p0=prefill, d0=decode",
        "PHASEPLANE_ENGINE": "emulated",
    }  # fmt: skip
    assert [i.instance_id for i in parse_options([], environ).instances] == ["p0", "d0"]


@pytest.mark.parametrize(
    ("argv", "environ", "sentence"),
    [
        ([], {}, "--control is missing"),
        (["--control", "tcp://127.0.0.1:1"], {}, "--instance is missing"),
        ([*BASE, "--instance", "d0=decode"], {}, "names d0 twice"),
        ([*BASE, "--instance", "d1=decode"], {}, "hosts one instance, got 2"),
        ([*BASE, "--instance", "d1=decoder"], {}, "got 'd1=decoder'"),
        ([*BASE, "--num-blocks", "many"], {}, "--num-blocks must be a whole number above 0, got 'many'"),
        ([*BASE, "--speed", "nan"], {}, "--speed must be a number above 0"),
        ([*BASE, "--spead", "1"], {}, "unrecognized arguments: --spead"),
        (BASE, {"PHASEPLANE_KV_GIB": "-1"}, "PHASEPLANE_KV_GIB must be a number above 0, got '-1'"),
        ([*BASE, "--kv-links", "0"], {}, "--kv-links must be a whole number above 0, got '0'"),
        ([*BASE, "--kv-links", "9", "--data-host", "10.0.0.1,10.1.0.1"], {}, "--kv-links 9 on each of 2 hosts"),
        ([*BASE, "--data-host", "10.0.0.1,10.1.0.1", "--data-advertise", "a"], {}, "--data-advertise 1; name as many"),
        ([*BASE, "--kv-backend", "rdma"], {}, "--kv-backend must be one of tcp, mooncake, nixl, got 'rdma'"),
        (BASE, {"PHASEPLANE_KV_BACKEND": "ucx"}, "PHASEPLANE_KV_BACKEND must be one of tcp, mooncake, nixl"),
        (BASE, {"PHASEPLANE_ENGINE": "tensorrt"}, "PHASEPLANE_ENGINE must be one of native, emulated"),
    ],
)
def test_what_cannot_be_read_is_named(argv: list[str], environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(argv, environ)
    assert sentence in str(caught.value)


async def test_emulated_engines_have_the_hardware_curve_and_memory_they_are_given() -> None:
    argv = [*BASE, "--engine", "emulated", "--model", "llama-3.1-8b", "--hardware", "H20", "--mfu", "0.25"]
    options = parse_options([*argv, "--kv-gib", "1"], {})
    engine = await engine_maker(options, options.instances[0])()
    assert engine.hardware.name == "H20"
    assert engine.num_blocks == 512  # 131072 bytes a token, 16 tokens a block
    assert engine.latency.mfu == 0.25
    await engine.close()
    with pytest.raises(InvalidValue, match="did you mean llama"):
        engine_maker(parse_options([*argv, "--model", "lama-3.1-8b"], {}), options.instances[0])
    with pytest.raises(InvalidValue, match="hardware class"):
        engine_maker(parse_options([*argv, "--hardware", "H9"], {}), options.instances[0])


@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_an_agents_kv_ports_have_the_hosts_links_and_backend_it_is_told(backend: str) -> None:
    argv = [*BASE, "--data-host", "127.0.0.1,127.0.0.2", "--data-advertise", "a.example,b.example", "--kv-links", "3"]
    (spec,) = NodeAgent(parse_options([*argv, "--kv-backend", backend], {}))._specs
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="uint8", rope="none")
    port = spec.make_port("d0", 1, HostArena(layout, 2))
    assert isinstance(port, TcpKvPort)
    assert port.endpoint == "tcp://a.example:0,tcp://b.example:0"
    assert port._links == 3
    ring = port._context.direct
    assert (None if ring is None else ring._reader.name) == (None if backend == "tcp" else backend)
