"""A server of somebody else's as an engine: whole requests by /v1/completions, nothing of its KV. We neither start nor
stop it; when it is lost the instance ends and comes back with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from nodes.engines.openai.carry import learned_carry
from nodes.engines.openai.dialect import PROBES, Dialect, Reader
from nodes.engines.openai.facts import Facts, read_facts, until_ready
from nodes.engines.openai.pace import measured
from nodes.engines.openai.text import Text
from nodes.engines.openai.upstream import BUSY, KEY_FAULTS, Declined, EngineSaid, Upstream, checked_url
from nodes.engines.served import Job, OnSaved, OnStarted, Output
from nodes.hardware import probe
from nodes.shapes import latency_profile, shape_from_config
from transfer.errors import EngineFailed, InvalidValue, JobFailed
from transfer.kv.arena import HostArena, KvArena
from transfer.models import read_identity
from transfer.profile import HardwareProfile, LatencyProfile, ModelShape
from transfer.terms import OPAQUE, KvLayout, ModelIdentity, SamplingParams, TokenIds

READY_S = 60.0
IDLE_S = 300.0
WATCH_S = 2.0
MAX_MISSED = 3
"""Questions after its health in a row that a server may fail."""
PROBE_TOKENS = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiOptions:
    """model_dir: directory of the model the server is said to serve: its tokenizer, context and shape are read from
    there. served_name: what the server calls it; None: its only one. key: for its Authorization header. insecure: plain
    http to another machine is meant. num_blocks: KV the server is taken to have; None: room for max_running requests
    of full length, so that the server's own queue decides. hardware: None: measure this machine. ready_s: how long it
    may take to serve. idle_s: longest time without a token of a request that it has taken.
    """

    url: str
    model_dir: Path
    served_name: str | None = None
    key: str | None = None
    insecure: bool = False
    block_size: int = 16
    num_blocks: int | None = None
    max_running: int = 256
    hardware: HardwareProfile | None = None
    ready_s: float = READY_S
    idle_s: float = IDLE_S


async def start_openai(options: OpenAiOptions) -> OpenAiEngine:
    """Wait for the server, find out what it understands and how fast it is. Raises InvalidValue for what no waiting
    mends, EngineFailed when it does not answer in time."""
    url = checked_url(options.url, options.insecure)
    identity = read_identity(options.model_dir)
    text = await asyncio.to_thread(Text, options.model_dir)
    upstream = Upstream(url, options.key, options.idle_s)
    try:
        await until_ready(upstream, options.ready_s)
        facts = await read_facts(upstream, options.served_name, identity)
        identity = msgspec.structs.replace(
            identity, revision=f"as served by {url}", max_context=min(identity.max_context, facts.max_context)
        )
        engine = OpenAiEngine(options, upstream, identity, facts, text)
        await engine.learn()
    except BaseException:
        await upstream.close()
        raise
    if facts.slots is not None and facts.slots < options.max_running:
        _log.warning("the server at %s runs %d requests at a time; with --max-running %d others wait there and not in "
                     "the control plane", url, facts.slots, options.max_running)  # fmt: skip
    return engine


class OpenAiEngine:
    """A ServedEngine; see nodes/engines/served.py."""

    kind = "openai"
    shares_kv = False

    def __init__(
        self, options: OpenAiOptions, upstream: Upstream, identity: ModelIdentity, facts: Facts, text: Text
    ) -> None:
        self.model, self.version, self.served_name = identity, facts.version, facts.served_name
        self._options, self._upstream, self._text = options, upstream, text
        self._dialect = PROBES[0]
        self.hardware = options.hardware or probe()
        self._shape = shape_from_config(options.model_dir)
        self.latency: LatencyProfile = latency_profile(self.hardware, self._shape)
        self.layout = _layout(self._shape, options.block_size)
        self.num_blocks = 1
        self.arena: KvArena = HostArena(self.layout, self.num_blocks)
        most = (facts.slots or options.max_running) * self.layout.num_blocks(identity.max_context)
        self.capacity_blocks = options.num_blocks or most
        self.max_length = identity.max_context

    async def learn(self) -> None:
        """Find the dialect, then the pace. Raises InvalidValue when the server refuses every form of a request."""
        refused = ""
        for tried in PROBES:
            try:
                self._dialect = await self._probe(tried)
                break
            except Declined as error:
                if error.status in KEY_FAULTS:
                    raise InvalidValue(f"{error.in_full}; put its key in a file named by --engine-key-file") from None
                if error.status in BUSY:
                    raise EngineFailed(error.in_full) from None
                refused = error.in_full
        else:
            raise InvalidValue(f"{refused}; it must serve /v1/completions")
        limit = min(self.model.max_context, self.capacity_blocks * self.layout.block_size)
        try:
            self._dialect = replace(self._dialect, carry=await learned_carry(self._text, self._drawn))
            self.latency = await measured(self.latency, self._timed, self.model.vocab_size, limit)
        except JobFailed as error:
            raise self._fails_at_once(error) from error

    async def run(self, job: Job, on_started: OnStarted, on_saved: OnSaved) -> AsyncGenerator[Output, None]:
        """See ServedEngine. Nothing is ever saved."""
        body = self._dialect.body(job, self.served_name, self._text)
        async with contextlib.aclosing(self._outputs(job, body, on_started)) as outputs:
            async for output in outputs:
                yield output

    async def _outputs(
        self, job: Job, body: dict[str, Any], on_started: OnStarted
    ) -> AsyncGenerator[Output, None]:  # fmt: skip
        reader = Reader(self._dialect, job, self._text, self.model.eos_token_ids)
        async with contextlib.aclosing(self._upstream.complete(body)) as chunks:
            async for chunk in chunks:
                if chunk is None:
                    on_started()
                elif (output := reader.take(chunk)) is not None:
                    yield output
                    if output.finish is not None:
                        return
        raise JobFailed(f"the server at {self._upstream.url} ended the stream without a reason")

    async def watch(self) -> None:
        """See ServedEngine."""
        missed = 0
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self._upstream.check()
                missed = 0
            except EngineFailed:
                missed += 1
                if missed >= MAX_MISSED:
                    raise

    async def close(self) -> None:
        """Idempotent; the server goes on."""
        await self._upstream.close()

    async def _probe(self, dialect: Dialect) -> Dialect:
        """One short request. Raises Declined when the server does not take it so, EngineFailed when it breaks."""
        sampling = SamplingParams(max_tokens=PROBE_TOKENS, temperature=0.0, logprobs=1 if dialect.extended else None)
        body = dialect.body(_job(self._text.encode("The"), sampling), self.served_name, self._text)
        try:
            async with contextlib.aclosing(self._upstream.complete(body)) as chunks:
                async for chunk in chunks:
                    choices = chunk.get("choices") if chunk is not None else None
                    if choices and (choices[0].get("text") or choices[0].get("token_ids")):
                        return dialect.learned(choices[0])
        except Declined:
            raise
        except JobFailed as error:
            raise self._fails_at_once(error) from error
        return dialect

    async def _drawn(self, prompt: TokenIds, more: dict[str, Any]) -> int | None:
        """The likeliest token after a prompt, asked for with `more` in the request; None where that is not taken."""
        job = _job(prompt, SamplingParams(max_tokens=1, temperature=0.0))
        body = self._dialect.body(job, self.served_name, self._text) | more
        try:
            async with contextlib.aclosing(self._outputs(job, body, lambda: None)) as outputs:
                return (await anext(outputs)).token_ids[0]
        except Declined as error:
            if error.status in BUSY:
                raise
            return None

    def _fails_at_once(self, error: JobFailed) -> EngineFailed:
        said = error.in_full if isinstance(error, EngineSaid) else error
        return EngineFailed(f"the server at {self._upstream.url} fails its first request: {said}")

    async def _timed(self, prompt: TokenIds, num_output: int) -> AsyncIterator[int]:
        job = _job(prompt, SamplingParams(max_tokens=num_output, temperature=0.0))
        async with contextlib.aclosing(self.run(job, lambda: None, lambda layer, first, count: None)) as outputs:
            async for output in outputs:
                yield len(output.token_ids)


def _job(tokens: TokenIds, sampling: SamplingParams) -> Job:
    return Job(request_id="start", generation=0, tokens=tokens, num_output=0, sampling=sampling, blocks=[],
               num_loaded=0, save_from=0)  # fmt: skip


def _layout(shape: ModelShape, block_size: int) -> KvLayout:
    """Counts the room of requests; the server's own layout is not known, and nobody reads it."""
    return KvLayout(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
                    block_size=block_size, dtype="bfloat16", rope=OPAQUE)  # fmt: skip
