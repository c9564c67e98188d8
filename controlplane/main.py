"""`python -m controlplane.main`: the one place where the control plane's objects are wired, started and stopped.

Exit status: 0 stopped by a signal, 1 the scheduler failed, 2 a setting is wrong, 4 a port is in use.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from controlplane.actors.metronome import Metronome
from controlplane.actors.scheduler import SchedulerActor
from controlplane.config import ALIASES, Config, load_config
from controlplane.core.events import AutopilotRestored, ClassesRestored, PlansRestored
from controlplane.core.scheduler import SchedulerCore
from controlplane.core.series import SeriesBook
from controlplane.gateway import past
from controlplane.gateway.app import build_app
from controlplane.gateway.door import open_door
from controlplane.gateway.errors import told
from controlplane.gateway.health import missing_role
from controlplane.gateway.live import PERIOD_S, LiveFeed
from controlplane.gateway.metrics import GatewayMetrics
from controlplane.gateway.service import Gateway, ServedModel
from controlplane.gateway.tokenizer import TextTokenizer
from controlplane.history.recorder import FlightFiles
from controlplane.history.store import HistoryStore
from controlplane.model import Served, load_model, why_refused
from controlplane.plane import Hooks, Plane, build
from transfer.api import RequestRecord
from transfer.errors import ConfigError, InvalidValue, PhaseplaneError
from transfer.models import model_dir
from transfer.said import say
from transfer.wire.curve import load_keys
from transfer.wire.endpoint import Timing
from transfer.wire.zmq import RouterEndpoint

EXIT_FAILED, EXIT_CONFIG, EXIT_PORT = 1, 2, 4
READY_CHECK_S = 0.1
FLUSH_S = 0.05
"""For the last aborts to leave this process, so that nodes free their blocks at once."""
_now = time.monotonic
"""Not the loop's clock: uvloop's has steps of a millisecond."""
_log = logging.getLogger("phaseplane")


class PortInUse(ConfigError):
    """A port that cannot be bound."""


@dataclass
class Server:
    """Everything one control plane owns, in the order it is stopped."""

    config: Config
    gateway: Gateway
    plane: Plane
    history: HistoryStore
    recorder: FlightFiles | None
    runner: web.AppRunner
    listening: asyncio.Server
    url: str
    stop: asyncio.Event
    failures: list[str]
    """Actors that ended for good, which is why it stops."""

    async def close(self) -> None:
        """Every client gets its terminal event, nodes are told, what was finished is on disk."""
        self.gateway.stopping = True
        self.listening.close()
        self.gateway.router.fail_all(told(503, say("ended.stopping"), retry_after_s=1.0))
        self.gateway.live.close()
        await self.runner.cleanup()
        await asyncio.sleep(FLUSH_S)
        await self.plane.stop()
        await asyncio.to_thread(self.history.close)
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)
        _forget_ready(self.config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal. Returns the exit status; every failure is one sentence on stderr."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        config = load_config(options.config, os.environ, _overrides(options))
        if options.check:
            check(config)
            return 0
        return _run(serve(config))
    except PortInUse as error:
        print(f"phaseplane: {error}", file=sys.stderr)
        return EXIT_PORT
    except InvalidValue as error:
        print(f"phaseplane: {error}", file=sys.stderr)
        return EXIT_CONFIG


def check(config: Config) -> None:
    """What can be found wrong before anything is started: key files, and settings that the model does not allow.

    Raises InvalidValue, one sentence; the settings themselves were checked when they were read.
    """
    _wire(config)
    if config.model.max_context is None and not config.models:
        return
    if config.model.engine == "native":
        try:
            model_dir(config.model.name)
        except InvalidValue:
            return  # it is not here: `phaseplane up` pulls it, and else the start says so
    for model in config.served.values():
        load_model(model)


async def serve(config: Config) -> int:
    """Start, run until SIGTERM, SIGINT or a failure, stop in order. Returns the exit status."""
    server = await start(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop.set)
    parent = _watch_parent(config.server.parent_pid, server.stop)
    try:
        await server.stop.wait()
    finally:
        if parent is not None:
            loop.remove_reader(parent)
            os.close(parent)
        await server.close()
    return EXIT_FAILED if server.failures else 0


async def start(config: Config) -> Server:
    """A running control plane. Raises PortInUse, ConfigError or InvalidValue, with nothing left running."""
    async with contextlib.AsyncExitStack() as undo:
        server = await _start(config, undo)
        undo.pop_all()
    _log.info(
        "serving %s at %s, nodes connect to %s", " and ".join(config.served), server.url, server.plane.endpoint.address
    )
    gc.collect()
    gc.freeze()
    return server


async def _start(config: Config, undo: contextlib.AsyncExitStack) -> Server:
    loaded = {name: load_model(model) for name, model in config.served.items()}
    models = [served for served, _ in loaded.values()]
    listener = _listen(config.server.host, config.server.port)
    undo.callback(listener.close)
    control_epoch = int.from_bytes(os.urandom(6), "big")
    history = _history(config)
    undo.callback(history.close)
    recorder = _recorder(config, control_epoch)
    if recorder is not None:
        undo.callback(recorder.close)
    metrics = GatewayMetrics(config.served_name, config.core.classes, [one.name for one in models])
    stop = asyncio.Event()
    failures: list[str] = []

    def failed(name: str, error: Exception) -> None:
        _log.critical("%s failed: the control plane stops", name, exc_info=error)
        failures.append(name)
        stop.set()

    def finished(record: RequestRecord) -> None:
        history.add(record)
        metrics.finished(record)

    hooks = Hooks(
        on_finished=finished, on_audit=history.add, on_kept=history.add, on_gap=metrics.gap, on_failure=failed,
        journal=recorder.record if recorder else None, check_hello=functools.partial(why_refused, models),
    )  # fmt: skip
    core = SchedulerCore(config.core, control_epoch, config.server.seed)
    limits = config.limits
    plane = build(
        core, _wire(config), hooks, now=_now, max_streams=limits.max_in_flight,
        max_unread_tokens=limits.max_unread_tokens,
    )  # fmt: skip
    undo.push_async_callback(plane.stop)
    try:
        await plane.start()
    except ConfigError as error:
        raise PortInUse(str(error)) from None
    gateway = _gateway(config, loaded, plane, history, metrics)
    await _recall(history, gateway.series, plane.scheduler)
    runner = web.AppRunner(build_app(gateway), handler_cancellation=True, shutdown_timeout=config.server.shutdown_s)
    undo.push_async_callback(runner.cleanup)
    await runner.setup()
    listening = await open_door(runner, listener, limits)
    undo.callback(listening.close)
    server = Server(config, gateway, plane, history, recorder, runner, listening, _url(listener), stop, failures)
    plane.supervisor.spawn("live", lambda: Metronome(gateway.live.tick, PERIOD_S))
    sample = past.sampling(gateway.series, plane.scheduler.readings, history.add)
    plane.supervisor.spawn("series", lambda: Metronome(sample, past.PERIOD_S))
    if config.server.ready_file:
        plane.supervisor.spawn("ready", functools.partial(_ready_watch, server, plane.scheduler))
    return server


async def _recall(history: HistoryStore, series: SeriesBook, scheduler: SchedulerActor) -> None:
    """Go on from what an earlier life has kept. What of it cannot be read is lost, and keeps nobody from starting."""
    try:
        series.load(await history.series())
    except PhaseplaneError as error:
        _log.error("charts begin anew: %s", error)
    try:
        if (kept := await history.autopilot()) is not None:
            scheduler.post(AutopilotRestored(state=kept, age_s=max(0.0, time.time() - kept.at_s)))
    except PhaseplaneError as error:
        _log.error("the autopilot is as configured, without the pins it had: %s", error)
    try:
        if (set_before := await history.classes()) is not None:
            scheduler.post(ClassesRestored(state=set_before))
    except PhaseplaneError as error:
        _log.error("traffic classes are as configured: %s", error)
    try:
        if (plans := await history.plans()) is not None:
            scheduler.post(PlansRestored(state=plans))
    except PhaseplaneError as error:
        _log.error("plans from before cannot be undone: %s", error)


def _gateway(
    config: Config, loaded: Mapping[str, tuple[Served, TextTokenizer]], plane: Plane, history: HistoryStore,
    metrics: GatewayMetrics,
) -> Gateway:  # fmt: skip
    return Gateway(
        config=config, models=tuple(
            ServedModel(served.name, name, tokenizer, config.served[name].name)
            for name, (served, tokenizer) in loaded.items()
        ),
        router=plane.router, control=plane.scheduler,
        archive=history, live=LiveFeed(plane.scheduler.state), series=SeriesBook(), metrics=metrics, now=_now,
        started_s=_now(),
    )  # fmt: skip


def _history(config: Config) -> HistoryStore:
    settings = config.history
    path = config.state_dir / "history.sqlite"
    return HistoryStore(path, max_rows=settings.max_rows, max_age_s=settings.max_age_days * 86400)


def _recorder(config: Config, control_epoch: int) -> FlightFiles | None:
    settings = config.history
    if not settings.flight_recorder:
        return None
    return FlightFiles(
        config.state_dir / "flight", config.core, control_epoch, config.server.seed,
        file_bytes=settings.flight_file_bytes, num_files=settings.flight_files,
    )  # fmt: skip


def _wire(config: Config) -> functools.partial[RouterEndpoint]:
    server = config.server
    allowed = None if server.curve_allowed is None else frozenset(server.curve_allowed)
    curve = None if server.curve_key_file is None else load_keys(Path(server.curve_key_file), allowed=allowed)
    host = f"[{server.wire_host}]" if ":" in server.wire_host else server.wire_host
    timing = Timing(heartbeat_s=config.scheduler.heartbeat_s, liveness_s=server.liveness_s)
    return functools.partial(RouterEndpoint, f"tcp://{host}:{server.wire_port}", timing=timing, curve=curve)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise PortInUse(f"cannot listen on {host}:{port} ({reason}); stop what uses it or choose --port") from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _ready_watch(server: Server, scheduler: SchedulerActor) -> Metronome:
    """Writes the ready file as soon as requests can be served, then rests."""
    path = Path(server.config.server.ready_file or "")
    _forget_ready(server.config)
    written = False

    def look() -> None:
        nonlocal written
        if written or missing_role(scheduler.state()) is not None:
            return
        written = True
        about = {"url": server.url, "wire": server.plane.endpoint.address, "pid": os.getpid()}
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(about) + b"\n")
        temporary.replace(path)
        _log.info("ready at %s", server.url)

    return Metronome(look, READY_CHECK_S)


def _watch_parent(pid: int | None, stop: asyncio.Event) -> int | None:
    """Stop when that process ends, also by SIGKILL. Returns the descriptor that tells."""
    if pid is None:
        return None
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        stop.set()
        return None
    asyncio.get_running_loop().add_reader(descriptor, stop.set)
    return descriptor


def _forget_ready(config: Config) -> None:
    if config.server.ready_file:
        Path(config.server.ready_file).unlink(missing_ok=True)


def _run(work: Coroutine[Any, Any, int]) -> int:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(work)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; it is not on Windows."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="controlplane.main", description="Phaseplane's control plane.")
    parser.add_argument("--config", type=Path, help="TOML file of settings")
    for name, key in ALIASES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=f"sets {key}")
    parser.add_argument("--check", action="store_true", help="only check the settings; start nothing")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="sets anything else")
    return parser


def _overrides(options: argparse.Namespace) -> dict[str, str]:
    chosen = {key: getattr(options, name) for name, key in ALIASES.items() if getattr(options, name) is not None}
    for assignment in options.set:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment} must look like SECTION.KEY=VALUE")
        chosen[key.strip()] = value.strip()
    return chosen


if __name__ == "__main__":
    sys.exit(main())
