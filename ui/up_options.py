"""The options of `phaseplane up`, as types: flag, variables, bounds and help of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def _option(flag: str, help: str, **more: Any) -> Any:
    """Two variables name it; the short one is what the programs that `up` starts read too."""
    name = flag.removeprefix("--").replace("-", "_").upper()
    return typer.Option(flag, envvar=[f"PHASEPLANE_UP_{name}", f"PHASEPLANE_{name}"], help=help, **more)


Prefill = Annotated[int, _option("--prefill", "Prefill instances.", min=0)]
Decode = Annotated[int, _option("--decode", "Decode instances.", min=0)]
Mixed = Annotated[int, _option("--mixed", "Instances that do both phases.", min=0)]
Pool = Annotated[int, _option("--pool", "KV pool nodes.", min=0)]
Engine = Annotated[
    Literal["native", "emulated", "vllm"], _option("--engine", "Real weights, ours or vLLM; or timed emulation.")
]
Join = Annotated[
    list[str] | None,
    _option("--join", "An OpenAI-compatible server as one more instance; repeatable.", metavar="URL[@CLASS]"),
]
VllmPython = Annotated[Path | None, _option("--vllm-python", "Interpreter of the environment that has vllm (vllm).")]
VllmArgs = Annotated[str | None, _option("--vllm-args", "More arguments for `vllm serve` (vllm).")]
Model = Annotated[
    str | None, _option("--model", "A name or a directory; by default smollm2-135m, emulated llama-3.1-8b.")
]
Hardware = Annotated[
    str, _option("--hardware", "Classes of prefill and decode, like H800,H20; native measures.", metavar="P[,D]")
]
Host = Annotated[str, _option("--host", "Where to listen.")]
Port = Annotated[int, _option("--port", "0 takes a free one.", min=0, max=65535)]
Dtype = Annotated[str | None, _option("--dtype", "float32, bfloat16 (native); by default as the weights are kept.")]
Speed = Annotated[float | None, _option("--speed", "Emulated time runs so many times faster.")]
KvGib = Annotated[float | None, _option("--kv-gib", "GiB of KV memory of each instance.")]
SsdDir = Annotated[
    Path | None, _option("--ssd-dir", "Where KV pools keep blocks beyond memory; by default in --state.")
]
SsdGib = Annotated[float | None, _option("--ssd-gib", "GiB each KV pool may use there; by default none.")]
PerProcess = Annotated[int, _option("--per-process", "Emulated instances that share one process.", min=1, max=256)]
State = Annotated[Path | None, _option("--state", "Where logs, history and audit go.")]
ReadyFile = Annotated[
    Path | None, _option("--ready-file", "Written when requests can be served, removed at start and end.")
]
Wait = Annotated[float, _option("--wait", "Longest wait until all serve, seconds.", min=1.0)]
NoConsole = Annotated[bool, _option("--no-console", "Start no console beside the fleet.")]
ConsolePort = Annotated[
    int, _option("--console-port", "Of the console; another one where it is taken.", min=0, max=65535)
]
