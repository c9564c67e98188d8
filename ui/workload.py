"""What a benchmark sends: jobs with a time, a body and, where it is known, the right answer. It sends nothing."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from transfer.errors import InvalidValue
from transfer.objectives import parse_objectives
from transfer.terms import Slo
from transfer.traces.arrivals import poisson_times
from transfer.traces.lines import decode_lines
from transfer.traces.loading import Wanted, load_trace
from transfer.traces.request import TraceRequest
from ui.errors import CliError, UsageFault

SAMPLE_TEXT = (
    "The harbour wakes before the town does. Gulls argue over crates of herring while an old clerk counts barrels "
    "of oil, rolls of copper wire and seven hundred sacks of flour bound for the northern islands. Nobody hurries: "
    "ships wait on tides, tides wait on the moon, and the moon, as every sailor knows, keeps her own accounts. "
    "Across the square a teacher writes 3.14159 on a blackboard; somebody laughs, somebody sleeps, and outside a boy "
    "sells plums, bread, newspapers & string. def add(x, y): return x + y; for i in range(10): print(i)\n"
)
"""Random prompts are made of this text's tokens: ordinary ones in every vocabulary, never a special token."""

_MIN_ALPHABET = 8


@dataclass(frozen=True, slots=True)
class Job:
    """One request to make. `expect` is the whole text of the right answer, or None."""

    index: int
    at_s: float
    prompt: str | list[int] | TraceRequest
    max_tokens: int
    traffic_class: str = ""
    expect: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0


class PromptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of --prompts-file, and of what --save writes. Exactly one of prompt and prompt_token_ids."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    max_tokens: int = 64
    expect: str | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int = 0
    traffic_class: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """What the command line asked for. rate None: as recorded (trace), else 1.0 a second."""

    rate: float | None
    num: int | None
    duration_s: float | None
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    trace: str | None = None
    trace_start_s: float = 0.0
    prompts_file: Path | None = None
    classes: tuple[tuple[str, float], ...] = ()
    seed: int = 0
    temperature: float = 0.0


class PromptMaker:
    """Random token ids out of an alphabet; equal arguments give equal prompts, in every run."""

    def __init__(self, alphabet: Sequence[int], seed: int) -> None:
        self._alphabet = sorted(set(alphabet))
        if len(self._alphabet) < _MIN_ALPHABET:
            raise CliError(
                f"the fleet's tokenizer made only {len(self._alphabet)} different tokens of a sample text; "
                "give real prompts with --prompts-file FILE"
            )
        self._seed = seed

    def tokens(self, job: Job) -> str | list[int]:
        """The prompt to send; blocks with equal ids become equal tokens."""
        if not isinstance(job.prompt, TraceRequest):
            return job.prompt
        call = job.prompt
        ids: list[int] = []
        for block in call.blocks:
            ids += self._draw(f"block-{block}", call.block_tokens)
        rest = call.prompt_tokens - len(ids)
        if rest > 0:
            ids += self._draw(f"call-{job.index}", rest)
        return ids[: call.prompt_tokens]

    def _draw(self, name: str, num: int) -> list[int]:
        return random.Random(f"{self._seed}-{name}").choices(self._alphabet, k=num)


def make_jobs(load: Load, max_context: int | None) -> tuple[list[Job], int]:
    """The jobs in order of time, and how many prompts were shortened to fit the model's context."""
    if load.prompts_file is not None:
        return _file_jobs(load), 0
    calls = _calls(load)
    num_clamped = 0
    jobs: list[Job] = []
    draw = random.Random(f"classes-{load.seed}")
    for index, call in enumerate(calls):
        fitted = _fit(call, max_context)
        num_clamped += fitted is not call
        name = fitted.traffic_class or _draw_class(load, draw)
        seed = load.seed + index
        jobs.append(
            Job(index, fitted.at_s, fitted, fitted.output_tokens, name, temperature=load.temperature, seed=seed)
        )
    return jobs, num_clamped


def parse_slos(texts: Sequence[str]) -> dict[str, Slo]:
    """`ttft:2,tpot:0.2` (all classes, key "") and `NAME=ttft:2,tpot:0.2`, seconds. Raises UsageFault."""
    try:
        return parse_objectives(texts)
    except InvalidValue as error:
        raise UsageFault(str(error)) from None


def parse_classes(text: str) -> tuple[tuple[str, float], ...]:
    """`chat:0.7,batch:0.3` -> names and weights. Raises UsageFault."""
    classes: list[tuple[str, float]] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, colon, weight = part.partition(":")
        if not name or (colon and not _is_positive(weight)):
            raise UsageFault(f"{text!r} is not a mix of classes; write it like --classes chat:0.7,batch:0.3")
        classes.append((name, float(weight) if colon else 1.0))
    return tuple(classes)


def parse_span(text: str, flag: str) -> tuple[int, int]:
    """`128` or `64-512` -> (least, most) tokens. Raises UsageFault naming the flag."""
    low, dash, high = text.strip().partition("-")
    try:
        span = (int(low), int(high) if dash else int(low))
    except ValueError:
        span = (0, 0)
    if not 1 <= span[0] <= span[1]:
        raise UsageFault(f"{text!r} is not a number of tokens; write it like {flag} 128 or {flag} 64-512")
    return span


def _calls(load: Load) -> list[TraceRequest]:
    if load.trace is not None:
        wanted = Wanted(
            rate=load.rate, num=load.num, duration_s=load.duration_s, start_s=load.trace_start_s, seed=load.seed
        )
        with _told_by_cli():
            return load_trace(load.trace, wanted).requests
    draw = random.Random(f"lengths-{load.seed}")
    return [
        TraceRequest(
            at_s=at_s, prompt_tokens=draw.randint(*load.prompt_tokens), output_tokens=draw.randint(*load.output_tokens)
        )
        for at_s in _arrival_times(load)
    ]


def _arrival_times(load: Load) -> list[float]:
    """`num` arrivals, or those within `duration_s`, or 100."""
    rate = 1.0 if load.rate is None else load.rate
    if load.duration_s is None:
        return poisson_times(rate, load.num or 100, load.seed)
    if math.isinf(rate):
        raise UsageFault("an infinite --rate needs --num, not --duration")
    spare = math.ceil(rate * load.duration_s * 2) + 100
    times = [at_s for at_s in poisson_times(rate, spare, load.seed) if at_s <= load.duration_s]
    return times[: load.num]


def _file_jobs(load: Load) -> list[Job]:
    lines = read_prompts(load.prompts_file) if load.prompts_file is not None else []
    num = load.num or len(lines)
    times = _arrival_times(replace(load, num=num))
    jobs: list[Job] = []
    for index, at_s in enumerate(times):
        line = lines[index % len(lines)]
        prompt: str | list[int] = line.prompt if line.prompt is not None else line.prompt_token_ids or []
        jobs.append(
            Job(
                index, at_s, prompt, line.max_tokens, line.traffic_class, line.expect, line.ignore_eos,
                line.temperature, line.seed,
            )
        )  # fmt: skip
    return jobs


def read_prompts(path: Path) -> list[PromptLine]:
    """The lines of a prompts file. Raises CliError naming the line that is wrong."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CliError(f"cannot read the prompts {path} ({reason}); give a file with --prompts-file FILE") from None
    lines: list[PromptLine] = []
    with _told_by_cli():
        for number, line in decode_lines(texts, path, PromptLine, "a prompt"):
            if (line.prompt is None) == (line.prompt_token_ids is None):
                raise CliError(f"line {number} of {path} must have one of prompt and prompt_token_ids; mend or drop it")
            lines.append(line)
    if not lines:
        raise CliError(f"{path} holds no prompt; give another file with --prompts-file FILE")
    return lines


@contextlib.contextmanager
def _told_by_cli() -> Iterator[None]:
    """Sentences about files are whole as they are."""
    try:
        yield
    except InvalidValue as error:
        raise CliError(str(error)) from None


def _fit(call: TraceRequest, max_context: int | None) -> TraceRequest:
    """The call, shortened if prompt and output do not fit the context together."""
    if max_context is None or call.prompt_tokens + call.output_tokens <= max_context:
        return call
    output = min(call.output_tokens, max(1, max_context // 2))
    prompt = max(1, min(call.prompt_tokens, max_context - output))
    return msgspec.structs.replace(call, prompt_tokens=prompt, output_tokens=output)


def _draw_class(load: Load, draw: random.Random) -> str:
    if not load.classes:
        return ""
    names, weights = zip(*load.classes, strict=True)
    return str(draw.choices(names, weights)[0])


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False
