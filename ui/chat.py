"""A conversation in the terminal over /v1/chat/completions, streamed, with history. Nothing is stored."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import msgspec

from ui.client import DEFAULT_URL, FleetClient, error_message, error_sentence, unreachable
from ui.completion import CHUNKS, Times
from ui.errors import CliError

PATH = "/v1/chat/completions"
TIMEOUT_S = 600.0

Write = Callable[[str], None]


@dataclass(slots=True)
class Turn:
    """One answer. Seconds count from sending; tpot_s needs two tokens. stopped: the user cut it short."""

    text: str = ""
    request_id: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    stopped: bool = False
    url: str = DEFAULT_URL

    def summary(self) -> str:
        """One line: TTFT, TPOT and the command that explains them."""
        parts = [] if self.ttft_s is None else [f"TTFT {self.ttft_s * 1000:.0f} ms"]
        if self.tpot_s is not None:
            parts.append(f"TPOT {self.tpot_s * 1000:.1f} ms")
        parts.append(f"{self.output_tokens} tokens")
        if self.stopped:
            parts.append("stopped")
        if self.request_id:
            at = "" if self.url == DEFAULT_URL else f" --url {self.url}"
            parts.append(f"phaseplane why {self.request_id}{at}")
        return ", ".join(parts)


@dataclass(slots=True)
class Conversation:
    """Messages so far. `ask` adds a question and its answer, also one that was stopped halfway."""

    client: FleetClient
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.system:
            self.messages.append({"role": "system", "content": self.system})

    async def ask(self, question: str, write: Write) -> Turn:
        """Stream one answer to `write`. Cancelling stops the answer on the fleet too.

        Raises CliError; the question then leaves the history again.
        """
        self.messages.append({"role": "user", "content": question})
        turn = Turn(url=self.client.url)
        try:
            await self._stream(turn, write)
        except asyncio.CancelledError:
            turn.stopped = True
        except CliError:
            self.messages.pop()
            raise
        if turn.stopped and not turn.text:
            self.messages.pop()
            return turn
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn

    async def _stream(self, turn: Turn, write: Write) -> None:
        loop = asyncio.get_running_loop()
        sent = loop.time()
        times = Times()
        body = msgspec.json.encode(self._body())
        try:
            async with self.client.stream(PATH, body, TIMEOUT_S) as (response, events):
                if response.status != 200:
                    raise CliError(error_sentence(response.status, await response.read(), self.client.url, PATH))
                async for event in events:
                    if event.data == b"[DONE]":
                        break
                    chunk = CHUNKS.decode(event.data)
                    if chunk.error is not None:
                        said = error_message(event.data) or "no reason given"
                        raise CliError(f"the answer broke off ({said}); run `phaseplane status` and ask again")
                    turn.request_id = chunk.id or turn.request_id
                    if chunk.usage is not None:
                        turn.output_tokens = chunk.usage.completion_tokens
                    for choice in chunk.choices:
                        turn.finish_reason = choice.finish_reason or turn.finish_reason
                        times.mark(choice, loop.time())
                        turn.ttft_s = None if times.first is None else times.first - sent
                        turn.output_tokens = times.num_chunks  # until the server's own count comes at the end
                        turn.tpot_s = times.tpot_s(turn.output_tokens)
                        if choice.piece:
                            turn.text += choice.piece
                            write(choice.piece)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise unreachable(self.client.url, error) from None
        except (ValueError, msgspec.DecodeError) as error:
            raise CliError(
                f"{self.client.url} streams something that is not a completion ({error}); check --url"
            ) from None
        if turn.finish_reason is None:
            raise CliError("the answer ended without a reason; run `phaseplane status` and ask again")
        turn.tpot_s = times.tpot_s(turn.output_tokens)

    def _body(self) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return body


async def ask_interruptible(conversation: Conversation, question: str, write: Write) -> Turn:
    """`ask`, where Ctrl-C stops the answer and not the program."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(conversation.ask(question, write))
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        return await task
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def pick_model(client: FleetClient, wanted: str | None) -> str:
    """The model asked for, or the first the fleet serves. Raises CliError naming those it has."""
    names = [card.id for card in await client.models()]
    if not names:
        raise CliError(f"the fleet serves no model yet; run `phaseplane status --url {client.url}`")
    if wanted is None:
        return names[0]
    if wanted not in names:
        raise CliError(f"the fleet does not serve {wanted!r}; use --model {names[0]}")
    return wanted
