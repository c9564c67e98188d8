"""VllmEngine: the ServedEngine over a vLLM that we started or that runs already, with our connector inside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nodes.engines.served import Job, OnSaved, OnStarted, Output
from nodes.engines.vllm.completion import read_output, request_body
from nodes.engines.vllm.frames import Hello
from nodes.engines.vllm.launch import Child, command, launch
from nodes.engines.vllm.link import Link, Watched
from nodes.engines.vllm.preflight import check_connector, check_server, check_worker
from nodes.engines.vllm.server import Rejected, VllmServer
from nodes.hardware import probe, with_gpus
from nodes.profiles import ProfileKey, load_profile
from nodes.shapes import latency_profile, shape
from transfer.errors import EngineFailed, InvalidValue, JobFailed
from transfer.kv.arena import HostArena, KvArena
from transfer.models import CONFIG_FILE, read_identity, read_json
from transfer.profile import HardwareProfile, LatencyProfile
from transfer.terms import FinishReason, KvLayout, ModelIdentity

log = logging.getLogger(__name__)

START_S = 300.0
SAVED_S = 30.0
"""KV of a request is in the arena this long after its last token at the latest."""
HEALTH_EVERY_S = 5.0
UNHEALTHY_LIMIT = 6
"""Consecutive health checks without an answer; a long step on a busy machine may miss one or two."""
BROKEN_S = 0.5
"""Between a process's death and its connector's or server's, at most."""
POLL_S = 0.25
LOCAL_URL = "http://vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """python: of an environment with vllm, to start one; or url and socket, of one that runs with our connector there
    (kv_connector_extra_config). dtype: "auto" takes vLLM's. block_size: of the arena; vLLM's is a multiple of it.
    num_blocks: of the arena; wins over kv_bytes. args, env: more for `vllm serve`. log_dir: where its log stays; None:
    it goes with the engine. threads: of a vLLM on CPUs that is started; None: all cores. hardware: None measures it.
    """

    model_dir: Path
    python: Path | None = None
    url: str | None = None
    socket: Path | None = None
    dtype: str = "auto"
    block_size: int = 32
    num_blocks: int | None = None
    kv_bytes: int = 1 << 30
    max_model_len: int | None = None
    threads: int | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    log_dir: Path | None = None
    hardware: HardwareProfile | None = None
    start_timeout_s: float = START_S


class VllmEngine:
    """Made by start_vllm. Idempotency: a job with the same tokens writes the same KV; `close` is idempotent."""

    kind = "vllm"
    shares_kv = True
    arena: KvArena

    def __init__(
        self, hello: Hello, name: str, model: ModelIdentity, arena: HostArena, link: Link, server: VllmServer,
        child: Child | None, directory: Path | None, latency: LatencyProfile, profile_key: ProfileKey,
    ) -> None:  # fmt: skip
        self.version, self.model, self.layout = hello.version, model, arena.layout
        self.arena, self.num_blocks = arena, arena.num_blocks
        self.capacity_blocks = hello.num_blocks * (hello.block_size // arena.layout.block_size)
        self.max_length = hello.max_model_len
        self.latency, self.hardware, self.profile_key = latency, latency.hardware, profile_key
        self.server, self.child = server, child
        self.num_loads_failed = 0
        self._name, self._arena, self._link, self._directory = name, arena, link, directory
        self._failure: str | None = None
        self._is_closed = False
        link.lost.add_done_callback(lambda lost: self._fail(lost.result()))

    async def run(self, job: Job, on_started: OnStarted, on_saved: OnSaved) -> AsyncGenerator[Output, None]:
        """As ServedEngine says. Of a job that wants KV alone, vLLM draws one token, which is dropped."""
        self._check_alive()
        wanted = min(len(job.tokens) - 1, len(job.blocks) * self.layout.block_size)
        if job.sampling is None and (wanted == 0 or job.save_from >= len(job.blocks)):
            on_started()
            yield Output((), finish=FinishReason.LENGTH, cached_tokens=wanted)
            return
        number, watched = self._link.grant(
            job.blocks, job.num_loaded, job.save_from, wanted, self._arena, on_started, on_saved
        )
        try:
            ticket = {"job": number, "num_loaded": job.num_loaded, "num_tokens": wanted}
            async with aclosing(self._drive(job, ticket, watched)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self.num_loads_failed += watched.loads_failed
            await _to_the_end(self._link.revoke(number))

    async def watch(self) -> None:
        """Raises EngineFailed once the process, the connector or the server's health is gone."""
        waits: list[Coroutine[Any, Any, str]] = [self._unhealthy(), _lost(self._link)]
        if self.child is not None:
            waits.append(self.child.ended(has_served=True))
        self._fail(await _first(waits))
        self._check_alive()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._fail("the engine is closed; start another instance")
        await self.server.close()
        if self.child is not None:
            await self.child.stop()  # before its link: without an agent its worker would end itself, and not in order
        await self._link.close()
        self._arena.close()
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _drive(self, job: Job, ticket: dict[str, int], watched: Watched) -> AsyncGenerator[Output, None]:
        body = request_body(job, ticket, self._name, self.model.eos_token_ids)
        num_logprobs = None if job.sampling is None else job.sampling.logprobs
        is_first = True
        try:
            async with aclosing(self.server.complete(body)) as events:
                async for data in events:
                    output = read_output(data, num_logprobs)
                    if output is None:
                        continue
                    if output.finish is not None:
                        await self._all_saved(watched)
                    cached = await self._num_cached(watched) if is_first else None
                    is_first = False
                    ids = () if job.sampling is None else output.token_ids
                    yield Output(ids, output.logprobs, output.finish, cached)
                    if output.finish is not None:
                        return
            raise JobFailed("vLLM's answer ended without a finish reason")
        except Rejected:
            raise
        except JobFailed as error:
            await self._survive(error)
            raise

    async def _survive(self, error: JobFailed) -> None:
        """Whether a request alone broke off or all of vLLM, which ends piece by piece. Raises EngineFailed for that."""
        await asyncio.wait([self._link.lost], timeout=BROKEN_S)
        if self._failure is None and not await self.server.is_healthy():
            self._fail(f"vLLM's server does not answer any more: {error}")
        self._check_alive()

    async def _num_cached(self, watched: Watched) -> int:
        await self._told(watched, lambda: watched.num_cached is not None, "that it began")
        return watched.num_cached or 0

    async def _all_saved(self, watched: Watched) -> None:
        await self._told(watched, lambda: watched.num_missing <= 0, "that its KV is saved")

    async def _told(self, watched: Watched, is_so: Any, what: str) -> None:
        try:
            await asyncio.wait_for(self._link.until(watched, is_so), SAVED_S)
        except TimeoutError:
            raise JobFailed(f"vLLM's connector did not say {what} within {SAVED_S:g} s") from None

    async def _unhealthy(self) -> str:
        missed = 0
        while missed < UNHEALTHY_LIMIT:
            await asyncio.sleep(HEALTH_EVERY_S)
            missed = 0 if await self.server.is_healthy() else missed + 1
        return f"vLLM's server has not answered {UNHEALTHY_LIMIT} health checks, {HEALTH_EVERY_S:g} s apart"

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            self.server.break_off()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(self._failure)


async def start_vllm(options: VllmOptions) -> VllmEngine:
    """Starts vLLM, or attaches to one, and waits until it serves. Nothing is left behind when it raises.

    Raises InvalidValue, in a sentence, for options or a vLLM that do not fit; EngineFailed when it did not come up.
    """
    if (options.python is None) == (options.url is None) or (options.url is None) != (options.socket is None):
        raise InvalidValue("give either vLLM's python, to start it, or the url and socket of one that runs")
    model = await asyncio.to_thread(read_identity, options.model_dir)
    config = await asyncio.to_thread(read_json, options.model_dir / CONFIG_FILE)
    async with contextlib.AsyncExitStack() as undo:
        directory = None if options.socket else Path(tempfile.mkdtemp(prefix="phaseplane-vllm-"))
        if directory is not None:
            undo.callback(shutil.rmtree, directory, ignore_errors=True)
        arenas: list[tuple[Hello, HostArena]] = []

        async def welcome(hello: Hello) -> HostArena:
            if arenas:
                check_worker(arenas[0][0], hello)
                return arenas[0][1]
            layout = check_connector(hello, model, config, options.dtype, options.block_size)
            arena = await asyncio.to_thread(_arena, options, layout)
            undo.callback(arena.close)
            arenas.append((hello, arena))
            return arena

        socket = options.socket or _below(directory, "link")
        link = Link(socket, welcome)
        undo.push_async_callback(link.close)
        await link.listen()
        child, server = None, VllmServer(options.url or LOCAL_URL, _below(directory, "http") if directory else None)
        undo.push_async_callback(server.close)
        if directory is not None:
            child = await _launch(options, model, directory, socket)
            undo.push_async_callback(child.stop)
        hello = await _joined(link, server, child, options.start_timeout_s)
        name = check_server(hello, await server.version(), await server.models())
        latency, key = await asyncio.to_thread(_latency, options, model, hello)
        engine = VllmEngine(hello, name, model, arenas[0][1], link, server, child, directory, latency, key)
        undo.pop_all()
    log.info(
        "vLLM %s serves %s with %d KV blocks in each of %d workers", hello.version, model.name, engine.capacity_blocks,
        hello.world_size,
    )  # fmt: skip
    return engine


async def _launch(options: VllmOptions, model: ModelIdentity, directory: Path, socket: Path) -> Child:
    if options.python is None:
        raise InvalidValue("vLLM's python is needed to start it")
    line = command(
        options.python.absolute(), options.model_dir.resolve(), socket, directory / "http", name=model.name,
        dtype=options.dtype, block_size=options.block_size, max_model_len=options.max_model_len, args=options.args,
    )  # fmt: skip
    return await launch(
        line, directory, (options.log_dir or directory) / "vllm.log", _threads(options) | dict(options.env)
    )


async def _joined(link: Link, server: VllmServer, child: Child | None, timeout_s: float) -> Hello:
    """What joined, once its server answers as well."""

    async def up() -> str:
        await asyncio.shield(link.joined)
        while True:
            if await server.is_healthy():
                return ""
            await asyncio.sleep(POLL_S)

    waits: list[Coroutine[Any, Any, str]] = [up(), _lost(link)]
    if child is not None:
        waits.append(child.ended(has_served=False))
    try:
        reason = await asyncio.wait_for(_first(waits), timeout_s)
    except TimeoutError:
        raise EngineFailed(
            f"vLLM did not come up within {timeout_s:g} s{link.absent()}; see its log, or allow it longer with "
            "--engine-start-s"
        ) from None
    if reason:
        raise EngineFailed(reason)
    return link.joined.result()


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Not cut short by a cancellation, which is raised afterwards. work: has a deadline of its own."""
    task, cancelled = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _first(waits: list[Coroutine[Any, Any, str]]) -> str:
    """The result of whichever ends first; the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _lost(link: Link) -> str:
    return await asyncio.shield(link.lost)


def _arena(options: VllmOptions, layout: KvLayout) -> HostArena:
    return HostArena(layout, options.num_blocks or options.kv_bytes // layout.block_bytes, shared=True)


def _latency(options: VllmOptions, model: ModelIdentity, hello: Hello) -> tuple[LatencyProfile, ProfileKey]:
    """What `phaseplane calibrate` kept for this vLLM, or else a preset."""
    hardware = options.hardware or probe()
    if hello.device != "cpu":
        hardware = with_gpus(hardware, hello.world_size)
    workers = f", {hello.world_size} workers" if hello.world_size > 1 else ""
    key = ProfileKey(
        model=model.revision, dtype=hello.dtype, device=f"{hello.device} {hardware.name}{workers}",
        num_threads=options.threads or 0, software=f"vllm {hello.version}",
        hardware=options.hardware.name if options.hardware else "",
    )  # fmt: skip
    stored = load_profile(key)
    return (stored.latency if stored else latency_profile(hardware, shape(str(options.model_dir)))), key


def _threads(options: VllmOptions) -> dict[str, str]:
    """vLLM on CPUs binds a thread to every core by itself: two of them would share the first ones."""
    if options.threads is None:
        return {}
    return {"OMP_NUM_THREADS": str(options.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def _below(directory: Path | None, name: str) -> Path:
    if directory is None:
        raise InvalidValue("give the socket of the vLLM that runs")
    return directory / name
