"""Offers an open-loop load to a fleet and times every answer. Arrivals never wait for answers.

It measures from the scheduled time of each request, so a slow client or server cannot hide (coordinated omission).
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from transfer.terms import Slo
from ui.answer import Answer, judge
from ui.client import FleetClient, error_message
from ui.errors import CliError
from ui.measure import BenchReport, Ending, Sample, summarize
from ui.workload import SAMPLE_TEXT, Job, Load, PromptLine, PromptMaker, make_jobs

now = time.perf_counter
"""The event loop's own clock is too coarse (uvloop: 1 ms)."""

PATH = "/v1/completions"
CLASS_HEADER = "x-phaseplane-class"
DEFAULT_CLASS = "default"
LAG_WARNING_S = 0.05

_AHEAD_S = 0.5
"""A request's body is made this long before it is due."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """timeout_s: longest wait for one whole answer. save: write what was answered as a prompts file."""

    load: Load
    model: str | None = None
    slos: dict[str, Slo] = field(default_factory=dict)
    timeout_s: float = 600.0
    save: Path | None = None


@dataclass(slots=True)
class Progress:
    """Live counts, for whoever draws them."""

    planned: int = 0
    sent: int = 0
    ended: int = 0
    failed: int = 0


OnProgress = Callable[[Progress], None]


class Bench:
    """One run. `run` may be cancelled: what is in flight then ends as cancelled and the report stays true."""

    def __init__(self, client: FleetClient, options: BenchOptions, on_progress: OnProgress | None = None) -> None:
        self._client, self._options = client, options
        self._on_progress = on_progress
        self._progress = Progress()
        self._samples: list[Sample] = []
        self._start = 0.0
        self.interrupted = False

    async def run(self) -> BenchReport:
        """Offer the whole load and wait for every answer. Raises CliError before the first request is sent."""
        options = self._options
        model = options.model or await self._first_model()
        tokenized = await self._client.tokenize(model, SAMPLE_TEXT)
        jobs, num_clamped = make_jobs(options.load, tokenized.max_model_len)
        slos = await self._objectives(jobs)
        _raise_file_limit()
        maker = PromptMaker(tokenized.tokens, options.load.seed)
        self._progress.planned = len(jobs)
        await self._offer(jobs, model, maker)
        self._samples.sort(key=lambda sample: sample.index)
        if options.save is not None:
            _save(options.save, jobs, self._samples, maker)
        return summarize(self._samples, slos, options.load.seed, num_clamped)

    async def _offer(self, jobs: list[Job], model: str, maker: PromptMaker) -> None:
        """Start each job at its time; a cancel from outside stops offering and cancels what is in flight."""
        self._start = now() + _AHEAD_S
        tasks: set[asyncio.Task[None]] = set()
        try:
            for job in jobs:
                await asyncio.sleep(self._start + job.at_s - _AHEAD_S - now())
                task = asyncio.create_task(self._one(job, model, maker))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            self.interrupted = True
        finally:
            for task in tuple(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, job: Job, model: str, maker: PromptMaker) -> None:
        prompt = maker.tokens(job)
        body = msgspec.json.encode(_body(job, model, prompt))
        due = self._start + job.at_s
        await _sleep_until(due)
        answer = Answer()
        lag_s = now() - due
        ending, error = Ending.CANCELLED, ""
        try:
            self._progress.sent += 1
            self._tell()
            ending, error = await self._ask(job, body, answer, due)
        finally:
            self._end(job, answer, ending, error, lag_s, prompt)

    async def _ask(self, job: Job, body: bytes, answer: Answer, due: float) -> tuple[Ending, str]:
        """Send and read to the end; returns how it ended and what went wrong."""
        timeout_s = self._options.timeout_s
        try:
            async with (
                asyncio.timeout(due + timeout_s - now()),
                self._client.stream(PATH, body, timeout_s, _class_header(job)) as (response, events),
            ):
                if response.status != 200:
                    said = error_message(await response.read()) or "no reason given"
                    ending = Ending.REJECTED if response.status == 429 else Ending.ERROR
                    return ending, "" if ending is Ending.REJECTED else f"HTTP {response.status}: {said}"
                async for event in events:
                    if event.data == b"[DONE]":
                        break
                    answer.take(event, now())
        except TimeoutError:
            return Ending.TIMED_OUT, f"no whole answer within {timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError, msgspec.DecodeError) as error:
            return Ending.ERROR, f"the stream broke off ({str(error) or type(error).__name__})"
        return judge(job, answer)

    def _end(self, job: Job, answer: Answer, ending: Ending, error: str, lag_s: float, prompt: str | list[int]) -> None:
        ended = now()
        due = self._start + job.at_s
        times = answer.times
        last = times.last if ending in (Ending.COMPLETED, Ending.WRONG) and times.last is not None else ended
        num_output = answer.usage.completion_tokens if answer.usage is not None else times.num_chunks
        num_prompt = len(prompt) if isinstance(prompt, list) else 0
        self._samples.append(
            Sample(
                index=job.index,
                traffic_class=job.traffic_class or DEFAULT_CLASS,
                ending=ending,
                at_s=job.at_s,
                lag_s=lag_s,
                ended_s=ended - self._start,
                ttft_s=None if times.first is None else times.first - due,
                tpot_s=times.tpot_s(num_output),
                e2e_s=last - due,
                max_itl_s=times.max_itl_s,
                prompt_tokens=answer.usage.prompt_tokens if answer.usage is not None else num_prompt,
                output_tokens=num_output,
                error=error,
                text="".join(answer.text) if self._options.save is not None else "",
            )
        )
        self._progress.ended += 1
        self._progress.failed += ending in (Ending.ERROR, Ending.WRONG, Ending.TIMED_OUT)
        self._tell()

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._progress)

    async def _first_model(self) -> str:
        cards = await self._client.models()
        if not cards:
            raise CliError(f"the fleet serves no model yet; run `phaseplane status --url {self._client.url}`")
        return cards[0].id

    async def _objectives(self, jobs: list[Job]) -> dict[str, Slo | None]:
        """Objectives by class: from --slo, else those the fleet declares."""
        names = {job.traffic_class or DEFAULT_CLASS for job in jobs}
        given = self._options.slos
        declared: dict[str, Slo | None] = {}
        if not all(name in given or "" in given for name in names):
            with contextlib.suppress(CliError):  # another OpenAI server can be measured too: it declares nothing
                declared = {view.name: view.slo for view in (await self._client.fleet()).classes}
        return {name: given.get(name) or given.get("") or declared.get(name) for name in sorted(names)}


async def run_interruptible(bench: Bench) -> BenchReport:
    """Run until done; SIGTERM ends it like Ctrl-C does, with a report of what was seen."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    if task is not None:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await bench.run()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _sleep_until(due: float) -> None:
    """A timer may fire up to a millisecond early (uvloop), so one sleep is not enough."""
    while (early_s := due - now()) > 0:  # noqa: ASYNC110 - it waits for time to pass, nothing sets it
        await asyncio.sleep(early_s)


def _body(job: Job, model: str, prompt: str | list[int]) -> dict[str, object]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": job.max_tokens,
        "temperature": job.temperature,
        "seed": job.seed,
        "ignore_eos": job.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _class_header(job: Job) -> dict[str, str]:
    return {CLASS_HEADER: job.traffic_class} if job.traffic_class else {}


def _save(path: Path, jobs: list[Job], samples: list[Sample], maker: PromptMaker) -> None:
    """Write the completed answers as a prompts file, so that a later run can demand the same text."""
    by_index = {job.index: job for job in jobs}
    lines: list[bytes] = []
    for sample in samples:
        if sample.ending is not Ending.COMPLETED:
            continue
        job = by_index[sample.index]
        prompt = maker.tokens(job)
        lines.append(
            msgspec.json.encode(
                PromptLine(
                    prompt=prompt if isinstance(prompt, str) else None,
                    prompt_token_ids=prompt if isinstance(prompt, list) else None,
                    max_tokens=job.max_tokens,
                    expect=sample.text,
                    ignore_eos=job.ignore_eos,
                    temperature=job.temperature,
                    seed=job.seed,
                    traffic_class=job.traffic_class,
                )
            )
        )
    try:
        path.write_bytes(b"".join(line + b"\n" for line in lines))
    except OSError as error:
        raise CliError(f"cannot write {path} ({error.strerror}); give another file with --save FILE") from None


def _raise_file_limit() -> None:
    """Every request in flight is a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
