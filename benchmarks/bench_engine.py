"""Native engine against transformers: prefill and decode tokens per second, side by side in one run.

Both run the same weights in the same dtype with as many threads and the same OpenMP settings, in alternating
rounds; medians are shown.
Each has a process of its own and waits while the other works: two OpenMP pools in one process slow each other.
Decode leaves the prompt's time out. `python benchmarks/bench_engine.py [--json PATH] [--device cpu|cuda]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from nodes.engines.engine import Chunk, Sampling, StepBatch
from nodes.engines.native.engine import NativeEngine
from nodes.engines.native.kv import TORCH_DTYPES
from transfer.errors import PhaseplaneError
from transfer.models import model_dir
from transfer.terms import SamplingParams

DECODE_PROMPT_TOKENS = 128
DECODE_TOKENS = 32
BUSY_SHARE = 0.05
"""Of all processor time spent: beyond it the figures say little, since a step waits for its slowest thread."""
GREEDY = SamplingParams(max_tokens=DECODE_TOKENS + 1, temperature=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(TORCH_DTYPES))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, help="also write JSON lines there")
    options = parser.parse_args()
    before = _cpu_seconds()
    try:
        rows = asyncio.run(_run(options))
    except PhaseplaneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    everyone, ours = (after - then for after, then in zip(_cpu_seconds(), before, strict=True))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    _print(rows, options)
    if everyone > 0 and 1 - ours / everyone > BUSY_SHARE:
        print(f"other programs used {1 - ours / everyone:.0%} of the processor time: repeat on a quiet machine")
    return 0


async def _run(options: argparse.Namespace) -> list[dict[str, Any]]:
    directory = model_dir(options.model)
    _progress("loading the model twice")
    engine = NativeEngine(
        directory,
        dtype=options.dtype,
        device=options.device,
        num_blocks=512,
        num_threads=options.threads,
        measure=False,
    )
    try:
        with RemotePeer(directory, options) as peer:
            return await _measure(engine, peer, options.rounds)
    finally:
        await engine.close()


async def _measure(engine: NativeEngine, peer: RemotePeer, rounds: int) -> list[dict[str, Any]]:
    cases = [(f"prefill_tokens_per_s_{n}", "prefill", n) for n in (512, 2048)]
    cases += [(f"decode_tokens_per_s_b{n}", "decode", n) for n in (1, 8)]
    figures: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name, _, _ in cases}
    for number in range(rounds + 1):
        for name, kind, size in cases:
            _progress(f"round {number}/{rounds} {name} ({'warm-up' if number == 0 else 'timed'})")
            ours = await (_prefill(engine, size) if kind == "prefill" else _decode(engine, size))
            theirs = peer.measure(kind, size)
            if number:
                figures[name][0].append(ours)
                figures[name][1].append(theirs)
    _progress("")
    return [_row(name, median(figures[name][0]), median(figures[name][1]), peer.name) for name, _, _ in cases]


def prompt(row: int, num_tokens: int) -> list[int]:
    """Arbitrary ordinary tokens, different in each row."""
    return [1000 + (row * 7919 + position * 31) % 30000 for position in range(num_tokens)]


async def _prefill(engine: NativeEngine, num_tokens: int) -> float:
    """Tokens per second of one whole prompt with its first token drawn."""
    tokens = prompt(0, num_tokens)
    blocks = list(range(-(-num_tokens // engine.layout.block_size)))
    chunk = Chunk("a", tokens, 0, blocks, Sampling(GREEDY, tokens, 0))
    started = time.perf_counter()
    await engine.step(StepBatch([chunk]))
    return num_tokens / (time.perf_counter() - started)


async def _decode(engine: NativeEngine, batch: int) -> float:
    """Tokens per second of greedy decoding after the prompts and their first tokens."""
    size = -(-(DECODE_PROMPT_TOKENS + DECODE_TOKENS) // engine.layout.block_size)
    tables = [list(range(row * size, (row + 1) * size)) for row in range(batch)]
    histories = [prompt(row, DECODE_PROMPT_TOKENS) for row in range(batch)]

    async def step(start: int, lengths: int, index: int) -> None:
        chunks = [
            Chunk(str(row), history[-lengths:], start, table, Sampling(GREEDY, history, index))
            for row, (history, table) in enumerate(zip(histories, tables, strict=True))
        ]
        result = await engine.step(StepBatch(chunks))
        for row, history in enumerate(histories):
            history.append(result.sampled[str(row)].token_id)

    await step(0, DECODE_PROMPT_TOKENS, 0)
    started = time.perf_counter()
    for index in range(DECODE_TOKENS):
        await step(DECODE_PROMPT_TOKENS + index, 1, index + 1)
    return batch * DECODE_TOKENS / (time.perf_counter() - started)


class RemotePeer:
    """A Peer in a process of its own."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve_peer, args=(theirs, directory, options), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> RemotePeer:
        self.name: str = self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(10.0)
        self._process.kill()

    def measure(self, kind: str, size: int) -> float:
        """Tokens per second of one run."""
        self._pipe.send((kind, size))
        figure: float = self._pipe.recv()
        return figure


def _serve_peer(pipe: Connection, directory: Path, options: argparse.Namespace) -> None:
    peer = Peer(directory, options)
    pipe.send(peer.name)
    while True:
        try:
            kind, size = pipe.recv()
        except EOFError:
            return
        pipe.send(peer.prefill(size) if kind == "prefill" else peer.decode(size))


class Peer:
    """transformers' generate, greedy."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        import torch
        import transformers

        self._torch = torch
        torch.set_num_threads(options.threads)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.name = f"transformers {transformers.__version__}"
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=TORCH_DTYPES[options.dtype])
        self._model = model.to(options.device).eval()
        self._device = options.device

    def prefill(self, num_tokens: int) -> float:
        return num_tokens / self._seconds([prompt(0, num_tokens)], 1)

    def decode(self, batch: int) -> float:
        prompts = [prompt(row, DECODE_PROMPT_TOKENS) for row in range(batch)]
        return batch * DECODE_TOKENS / (self._seconds(prompts, DECODE_TOKENS + 1) - self._seconds(prompts, 1))

    def _seconds(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Of one generate call that yields exactly num_tokens for each prompt."""
        ids = self._torch.tensor(prompts, device=self._device)
        generate: Callable[..., Any] = self._model.generate
        started = time.perf_counter()
        with self._torch.inference_mode():
            output = generate(
                input_ids=ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
        output.tolist()  # waits for a device
        return time.perf_counter() - started


def _cpu_seconds() -> tuple[float, float]:
    """(spent by all programs, spent by this one and its ended children). Zeros where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0, 0.0
    ticks = [int(value) for value in stat.read_text(encoding="utf-8").splitlines()[0].split()[1:8]]
    busy = sum(ticks) - ticks[3] - ticks[4]  # without idle and waiting for disks
    return busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def _row(name: str, ours: float, theirs: float, peer_name: str) -> dict[str, Any]:
    return {
        "name": name,
        "ours": round(ours, 1),
        "peer": round(theirs, 1),
        "peer_name": peer_name,
        "unit": "tokens/s",
        "ratio": round(ours / theirs, 3),
    }


def _print(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    title = f"{options.model}, {options.dtype}, {options.device}, {options.threads} threads, tokens/s"
    table = Table("", "native engine", rows[0]["peer_name"], "ratio", title=title)
    for row in rows:
        table.add_row(row["name"], f"{row['ours']:.1f}", f"{row['peer']:.1f}", f"{row['ratio']:.2f}x")
    Console().print(table)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
