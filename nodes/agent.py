"""The node agent: one process that hosts instances and joins them to a control plane. `python -m nodes.agent --help`.

Starts, supervises and stops instances (instance.py); knows nothing of requests. Exit status: 0 after SIGTERM,
SIGINT or the parent's end; 1 when an instance failed too often; 2 for a wrong setting; 3 when refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nodes.instance import InstanceActor, InstanceSpec, RolePort
from nodes.making import engine_maker
from nodes.options import AgentOptions, InstanceName, parse_options
from transfer.actors.supervision import Supervisor
from transfer.errors import InvalidValue
from transfer.keys import load_data_key
from transfer.kv.arena import KvArena, remove_stale_arenas
from transfer.kv.links.shm import local_host_id
from transfer.kv.links.tcp import TcpKvPort
from transfer.terms import InstanceId, Role
from transfer.wire.curve import CurveKeys, check_bind, load_keys
from transfer.wire.endpoint import Endpoint, OnBad, OnMessage, OnPeer
from transfer.wire.zmq import DealerEndpoint

FAILED = 1
MISCONFIGURED = 2
STOP_S = 3.0
"""An orderly exit takes at most this long, LAST_RESORT_S with everything that hangs."""
LAST_RESORT_S = 8
FREEZE_AFTER_S = 5.0

_log = logging.getLogger("nodes.agent")


class NodeAgent:
    """Owns the instances of one process. `run` returns the exit status; `stop` asks it to."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._host_id = local_host_id()
        self._roles = {one.instance_id: one.role for one in options.instances}
        self._status = 0
        self._stop = asyncio.Event()
        self._supervisor = Supervisor("agent", self._escalated)
        self._curve, self._data_key = _keys(options)
        self._specs = [self._spec(name) for name in options.instances]

    def stop(self, reason: str, status: int = 0) -> None:
        """Leave in order. The first call counts."""
        if not self._stop.is_set():
            _log.info("stopping: %s", reason)
            self._status = status
            self._stop.set()
            signal.alarm(LAST_RESORT_S)  # whatever hangs then, a thread included: the kernel ends the process

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        freeze = loop.call_later(FREEZE_AFTER_S, _freeze)
        watched = self._watch_parent(loop)
        try:
            for spec in self._specs:
                self._supervisor.spawn(spec.instance_id, lambda spec=spec: self._life(spec))  # type: ignore[misc]
            await self._stop.wait()
        finally:
            freeze.cancel()
            if watched is not None:
                loop.remove_reader(watched)
                os.close(watched)
            await asyncio.gather(*(self._supervisor.stop_actor(spec.instance_id, STOP_S) for spec in self._specs))
        return self._status

    def _life(self, spec: InstanceSpec) -> InstanceActor:
        return InstanceActor(replace(spec, role=self._roles[spec.instance_id]))

    def _escalated(self, name: str, error: Exception) -> None:
        self.stop(f"{name} failed too often, last with {type(error).__name__}: {error}", FAILED)

    def _give_up(self, sentence: str, status: int) -> None:
        if not self._stop.is_set():
            print(f"phaseplane node: {sentence}", file=sys.stderr)
        self.stop("an instance gave up", status)

    def _role_changed(self, instance_id: InstanceId, role: Role) -> None:
        self._roles[instance_id] = role

    def _watch_parent(self, loop: asyncio.AbstractEventLoop) -> int | None:
        """Stop when the parent ends, also by SIGKILL, without asking for it again and again."""
        pid = self._options.parent_pid
        if pid is None:
            return None
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self.stop("the parent has ended already")
            return None
        loop.add_reader(descriptor, self.stop, "the parent has ended")
        return descriptor

    def _spec(self, name: InstanceName) -> InstanceSpec:
        options = self._options

        def make_port(instance_id: InstanceId, epoch: int, arena: KvArena) -> RolePort:
            return TcpKvPort(
                instance_id=instance_id, epoch=epoch, arena=arena, host=options.data_host, host_id=self._host_id,
                advertise=options.data_advertise, auth_key=self._data_key, links=options.kv_links,
                direct=None if options.kv_backend == "tcp" else options.kv_backend,
            )  # fmt: skip

        def make_endpoint(instance_id: InstanceId, on_message: OnMessage, on_peer: OnPeer, on_bad: OnBad) -> Endpoint:
            return DealerEndpoint(
                options.control, instance_id, on_message=on_message, on_peer=on_peer, on_bad=on_bad, curve=self._curve
            )

        return InstanceSpec(
            instance_id=name.instance_id, role=name.role, host_id=self._host_id,
            make_engine=engine_maker(options, name), make_port=make_port, make_endpoint=make_endpoint,
            give_up=self._give_up, role_changed=self._role_changed, token_budget=options.token_budget,
            max_running=min(options.max_running, options.token_budget), prefix_cache=options.prefix_cache,
            grace_s=options.grace_s,
        )  # fmt: skip


async def serve(options: AgentOptions) -> int:
    """Host the instances until told to stop; returns the exit status. Raises InvalidValue for what cannot be made."""
    if removed := remove_stale_arenas():
        _log.info("removed the KV memory of %d dead processes", removed)
    agent = NodeAgent(options)
    names = ", ".join(f"{one.instance_id} ({one.role})" for one in options.instances)
    _log.info("hosting %s on the %s engine; control plane at %s", names, options.engine, options.control)
    return await agent.run()


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv)
        logging.basicConfig(
            stream=sys.stderr, level=options.log_level.upper(),
            format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S",
        )  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt):
            return asyncio.run(serve(options))
    except InvalidValue as error:
        print(f"phaseplane node: {error}", file=sys.stderr)
        return MISCONFIGURED
    return 0


def _keys(options: AgentOptions) -> tuple[CurveKeys | None, bytes | None]:
    """What proves this node to the control plane and to its peers. Raises ConfigError."""
    curve = data_key = None
    if options.curve_key_file is not None:
        curve = load_keys(Path(options.curve_key_file), server_public=options.control_public_key)
    check_bind(options.control, curve)
    if options.data_key_file is not None:
        data_key = load_data_key(Path(options.data_key_file))
    return curve, data_key


def _freeze() -> None:
    """What start-up made lives as long as the process: the collector need not look at it again."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
