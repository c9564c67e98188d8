"""What a node agent is told: command line, else PHASEPLANE_* variables, else defaults. Refuses what it cannot read."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from transfer.errors import ConfigError
from transfer.terms import Role

ENV_PREFIX = "PHASEPLANE_"
ENGINES = ("native", "emulated", "vllm", "openai")
KV_BACKENDS = ("tcp", "mooncake", "nixl")
MAX_KV_LINKS = 16


@dataclass(frozen=True, slots=True)
class InstanceName:
    """ "ID=ROLE" or "ID=ROLE@HARDWARE"; hardware None: the agent's."""

    instance_id: str
    role: Role
    hardware: str | None = None


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """One agent process. Sizes in tokens, blocks and GiB; times in seconds.

    hardware: a class (H800, H20, ...), or "auto": measured for the native engine, CPU for the emulated one.
    kv_gib and num_blocks: KV memory of each instance; num_blocks wins; by default what the hardware leaves.
    speed: emulated time is divided by it; inf takes no time. mfu, mbu, alpha_s, beta_s: the latency curve of an
    emulated engine, where it is to differ from the preset. parent_pid: end when that process does.
    ssd_dir, ssd_gib: where a kv_pool keeps blocks beyond its memory, each instance in a directory of its own in it, and
    how much at most; without ssd_dir it has no SSD tier.
    data_host, data_advertise: where KV is received, and what peers are told where it is another; several hosts, one for
    each network card, with commas between. kv_links: connections to each host of a peer. kv_backend: who moves KV
    between hosts. data_key_file, curve_key_file, control_public_key: needed beyond loopback, see transfer/keys.py.
    vllm_python: of an environment with vllm, which is started from it; vllm_args: more for `vllm serve`; vllm_socket:
    with engine_url, of a vLLM that runs already with our connector. max_model_len: of one that is started. engine_url:
    of such a vLLM, or of any OpenAI-compatible server; its name for the model, the file that holds its key (or
    ENGINE_KEY in the environment; never a flag, which others can see), and whether plain http to another machine is
    meant (docs/engines.md). engine_start_s: how long a vLLM or a server may take until it serves; None: 300 and 60.
    engine_idle_s: how long a server that is joined by its URL may bring no token of a request that it has taken.
    """

    control: str
    instances: tuple[InstanceName, ...]
    engine: str = "native"
    model: str = "smollm2-135m"
    dtype: str = "auto"
    device: str = "auto"
    hardware: str = "auto"
    tp: int = 1
    kv_gib: float | None = None
    num_blocks: int | None = None
    ssd_dir: str | None = None
    ssd_gib: float | None = None
    block_size: int = 16
    token_budget: int = 2048
    max_running: int = 256
    prefix_cache: bool = True
    data_host: str = "127.0.0.1"
    data_advertise: str | None = None
    kv_links: int = 1
    kv_backend: str = "tcp"
    data_key_file: str | None = None
    curve_key_file: str | None = None
    control_public_key: str | None = None
    threads: int | None = None
    speed: float = 1.0
    jitter: float = 0.0
    seed: int = 0
    vllm_python: str | None = None
    vllm_args: tuple[str, ...] = ()
    vllm_socket: str | None = None
    max_model_len: int | None = None
    engine_url: str | None = None
    engine_served_name: str | None = None
    engine_key_file: str | None = None
    engine_insecure: bool = False
    engine_start_s: float | None = None
    engine_idle_s: float = 300.0
    mfu: float | None = None
    mbu: float | None = None
    alpha_s: float | None = None
    beta_s: float | None = None
    grace_s: float = 10.0
    parent_pid: int | None = None
    log_level: str = "info"


def parse_options(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> AgentOptions:
    """Raises ConfigError with a sentence that names the flag or variable. `--help` prints and exits with 0."""
    given = vars(_parser().parse_args(list(argv)))
    values: dict[str, Any] = {}
    for field in fields(AgentOptions):
        text = given[field.name]
        where = "--" + field.name.replace("_", "-").removesuffix("s" if field.name == "instances" else "")
        if text is None and (variable := ENV_PREFIX + field.name.upper()) in environ:
            text, where = environ[variable], variable
        if text is not None:
            values[field.name] = _READERS[field.name](where, text)
    for required, example in (("control", "tcp://127.0.0.1:5555"), ("instances", "decode-0=decode")):
        if required not in values:
            flag = required.removesuffix("s") if required == "instances" else required
            raise ConfigError(f"--{flag} is missing; give for example --{flag} {example}")
    return _checked(AgentOptions(**values))


def _checked(options: AgentOptions) -> AgentOptions:
    names = [one.instance_id for one in options.instances]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--instance names {twice} twice; give every instance a name of its own")
    if options.engine != "emulated" and len(names) > 1:
        raise ConfigError(
            f"an agent with a real engine hosts one instance, got {len(names)}; start one agent for each, or use "
            "--engine emulated"
        )
    _check_engine(options)
    if options.ssd_gib is not None and options.ssd_dir is None:
        raise ConfigError("--ssd-gib says how much, --ssd-dir where; give --ssd-dir too")
    num_hosts = len(options.data_host.split(","))
    num_shown = num_hosts if options.data_advertise is None else len(options.data_advertise.split(","))
    if num_shown != num_hosts:
        raise ConfigError(f"--data-host names {num_hosts} hosts, --data-advertise {num_shown}; name as many")
    if options.kv_links * num_hosts > MAX_KV_LINKS:
        raise ConfigError(
            f"--kv-links {options.kv_links} on each of {num_hosts} hosts is too much; {MAX_KV_LINKS} in all may be"
        )
    if (options.curve_key_file is None) != (options.control_public_key is None):
        raise ConfigError("--curve-key-file and --control-public-key go together; give both or neither")
    return options


def _check_engine(options: AgentOptions) -> None:
    """Which engine's own settings go together."""
    role = options.instances[0].role
    if options.engine == "openai":
        if options.engine_url is None:
            raise ConfigError("--engine openai joins a server that runs; say where with --engine-url http://HOST:PORT")
        if role is not Role.MIXED:
            raise ConfigError(
                "a server joined by its URL keeps its KV to itself, so it serves whole requests: give its instance the "
                f"role mixed, not {role.value}"
            )
    elif options.engine == "vllm" and role is not Role.KV_POOL:
        if (options.vllm_python is None) == (options.engine_url is None):
            raise ConfigError(
                "--engine vllm needs one of --vllm-python, to start it, and --engine-url, of one that runs"
            )
        if (options.engine_url is None) != (options.vllm_socket is None):
            raise ConfigError("--engine-url and --vllm-socket go together: the server, and the path its connector has")
    elif options.engine != "vllm":
        for name in ("engine_url", "vllm_python"):
            if getattr(options, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is for --engine vllm or openai, but the engine is {options.engine}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m nodes.agent --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m nodes.agent", description="Hosts Phaseplane instances and joins them to a control plane.",
        epilog=f"Every option can also be set as {ENV_PREFIX}<NAME>, for example {ENV_PREFIX}CONTROL.",
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--control", metavar="URL", help="the control plane, for example tcp://127.0.0.1:5555")
    add("--instance", dest="instances", action="append", metavar="ID=ROLE[@HARDWARE]",
        help="an instance to host, as prefill, decode, mixed or kv_pool; repeat for an emulated fleet")  # fmt: skip
    add("--engine", metavar="|".join(ENGINES), help="default native")
    add("--model", metavar="NAME|DIR", help="a pulled model's name, a directory, or for emulation a known shape")
    add("--dtype", help="auto, float32, bfloat16 or float16 (native)")
    add("--device", help="auto, cpu or cuda (native)")
    add("--hardware", help="H800, H20, H100, H200, A100, L40S, CPU or auto")
    add("--tp", help="GPUs of one emulated instance")
    add("--kv-gib", help="GiB of KV memory of an instance")
    add("--num-blocks", help="KV blocks of an instance, instead of --kv-gib")
    add("--ssd-dir", metavar="DIR", help="where a kv_pool keeps blocks beyond its memory; default: nowhere")
    add("--ssd-gib", help="GiB that each kv_pool may use there, default 16")
    add("--block-size", help="tokens a KV block holds, default 16")
    add("--token-budget", help="most tokens one step computes, default 2048")
    add("--max-running", help="most requests an instance runs at once, default 256")
    add("--prefix-cache", help="yes or no, default yes")
    add("--data-host", metavar="HOST[,HOST]", help="addresses KV is received on, default 127.0.0.1")
    add("--data-advertise", metavar="HOST[,HOST]", help="hosts that peers reach it by, where they are not --data-host")
    add("--kv-links", help="connections KV is striped over, to each host of a peer; default 1")
    add("--kv-backend", metavar="|".join(KV_BACKENDS),
        help="who moves KV between hosts; other than tcp its package must be installed; default tcp")  # fmt: skip
    add("--data-key-file", help="secret of KV connections; needed beyond loopback")
    add("--curve-key-file", help="this node's CURVE keys; needed beyond loopback")
    add("--control-public-key", help="the control plane's CURVE public key")
    add("--threads", help="threads of the native engine")
    add("--vllm-python", metavar="FILE", help="interpreter of the environment with vllm, to start it (vllm)")
    add("--vllm-args", metavar="TEXT", help="more arguments for `vllm serve`, as a shell would split them")
    add("--vllm-socket", metavar="FILE", help="with --engine-url: the path its connector has, of a vLLM that runs")
    add("--max-model-len", help="longest context of a vLLM that is started")
    add("--engine-url", metavar="URL", help="an OpenAI-compatible server (openai), or a vLLM that runs (vllm)")
    add("--engine-served-name", metavar="NAME", help="what that server calls the model; default its only one")
    add("--engine-key-file", metavar="FILE", help=f"that server's API key; or set {ENV_PREFIX}ENGINE_KEY")
    add("--engine-insecure", help="yes: plain http to another machine is meant")
    add("--engine-start-s", help="how long it may take until it serves; default 300 (vllm), 60 (openai)")
    add("--engine-idle-s", help="how long that server may bring no token of a request it has taken, default 300")
    add("--speed", help="emulated time is divided by this; inf takes no time")
    add("--jitter", help="spread of emulated step times, 0 to below 1")
    add("--seed", help="of the jitter")
    add("--mfu", help="emulated: share of peak compute that prefill reaches")
    add("--mbu", help="emulated: share of memory bandwidth that decode reaches")
    add("--alpha-s", help="emulated: seconds every step takes beyond compute and memory")
    add("--beta-s", help="emulated: seconds every sequence adds to a step")
    add("--grace-s", help="how long work goes on without a control plane, default 10")
    add("--parent-pid", help="end when this process ends")
    add("--log-level", help="debug, info, warning or error")
    return parser


def _number(kind: Callable[[str], Any], *, above: float, what: str) -> Callable[[str, str], Any]:
    def read(where: str, text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value > above:
            raise ConfigError(f"{where} must be {what}, got {text!r}")
        return value

    return read


def _choice(*choices: str) -> Callable[[str, str], str]:
    def read(where: str, text: str) -> str:
        if text.lower() not in choices:
            raise ConfigError(f"{where} must be one of {', '.join(choices)}, got {text!r}")
        return text.lower()

    return read


def _text(where: str, text: str) -> str:
    if not text:
        raise ConfigError(f"{where} must not be empty")
    return text


def _yes_no(where: str, text: str) -> bool:
    return _choice("yes", "no", "true", "false", "1", "0")(where, text) in ("yes", "true", "1")


def _words(where: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{where} cannot be split into arguments ({error}); mend its quotes") from None


def _instances(where: str, given: str | list[str]) -> tuple[InstanceName, ...]:
    texts = given.split(",") if isinstance(given, str) else given
    return tuple(_instance(where, text.strip()) for text in texts)


def _instance(where: str, text: str) -> InstanceName:
    instance_id, _, rest = text.partition("=")
    role, _, hardware = rest.partition("@")
    if not instance_id or role not in list(Role):
        raise ConfigError(f"{where} must be ID=ROLE with one of the roles {', '.join(Role)}, got {text!r}")
    return InstanceName(instance_id, Role(role), hardware or None)


_COUNT = _number(int, above=0, what="a whole number above 0")
_POSITIVE = _number(float, above=0.0, what="a number above 0")
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "control": _text, "instances": _instances, "engine": _choice(*ENGINES), "model": _text,
    "dtype": _choice("auto", "float32", "bfloat16", "float16"), "device": _choice("auto", "cpu", "cuda"),
    "hardware": _text, "tp": _COUNT, "kv_gib": _POSITIVE, "num_blocks": _COUNT, "ssd_dir": _text, "ssd_gib": _POSITIVE,
    "block_size": _COUNT,
    "token_budget": _COUNT, "max_running": _COUNT, "prefix_cache": _yes_no, "data_host": _text, "threads": _COUNT,
    "kv_links": _COUNT, "kv_backend": _choice(*KV_BACKENDS),
    "data_advertise": _text, "data_key_file": _text, "curve_key_file": _text, "control_public_key": _text,
    "speed": _POSITIVE, "jitter": _number(float, above=-1e-9, what="a number from 0 to below 1"),
    "vllm_python": _text, "vllm_args": _words, "vllm_socket": _text, "max_model_len": _COUNT, "engine_url": _text,
    "engine_served_name": _text, "engine_key_file": _text, "engine_insecure": _yes_no,
    "engine_start_s": _POSITIVE, "engine_idle_s": _POSITIVE,
    "seed": _number(int, above=-1, what="a whole number from 0"), "mfu": _POSITIVE, "mbu": _POSITIVE,
    "alpha_s": _number(float, above=-1e-9, what="a number from 0"),
    "beta_s": _number(float, above=-1e-9, what="a number from 0"), "grace_s": _POSITIVE, "parent_pid": _COUNT,
    "log_level": _choice("debug", "info", "warning", "error"),
}  # fmt: skip
