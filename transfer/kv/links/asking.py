"""Questions to a pool that move no KV, on one connection: those put here and those answered here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from transfer.errors import KvError, KvTransferFailed
from transfer.kv.frames import Answer, Ask, Refuse
from transfer.kv.links.context import PortContext, Wire
from transfer.kv.port import KvAnswer, KvAsk


@dataclass(slots=True)
class AskCall:
    """A question this side put. result: the answer, or the KvError it ended with."""

    stream: int
    result: asyncio.Future[KvAnswer | KvError]

    def finish(self, result: KvAnswer | KvError) -> None:
        if not self.result.done():
            self.result.set_result(result)


class Asking:
    """Open questions of one connection. An answer to a question given up a moment ago means nothing."""

    def __init__(self, context: PortContext, wire: Wire) -> None:
        self._context, self._wire = context, wire
        self._calls: dict[int, AskCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def ask(self, stream: int, ask: KvAsk) -> AskCall:
        """Put a question; the call's future says how it was answered."""
        call = AskCall(stream, asyncio.get_running_loop().create_future())
        self._calls[stream] = call
        self._wire.send(Ask(stream=stream, ask=ask))
        return call

    def end(self, call: AskCall) -> None:
        """Nobody waits for it any more. Idempotent."""
        self._calls.pop(call.stream, None)

    def serve(self, frame: Ask) -> None:
        """Answer a peer's question with what the role says. Raises Refused."""
        ask, role = frame.ask, self._context.role()
        self._context.check_asker(ask.target_epoch, ask.fingerprint)
        self._wire.send(Answer(stream=frame.stream, answer=role.kv_asked(ask)))

    def receive(self, frame: Answer | Refuse) -> None:
        call = self._calls.get(frame.stream)
        if call is not None:
            call.finish(frame.answer if isinstance(frame, Answer) else KvTransferFailed(frame.reason))

    def lost(self, error: KvError) -> None:
        for call in list(self._calls.values()):
            call.finish(error)
