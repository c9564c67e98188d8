"""One generating call, whatever its form: opens its outputs, then streams them as SSE or collects them.

What chunks and bodies look like is the Format's (openai_chat.py, openai_completions.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from controlplane.core.events import Arrived, RequestSpec
from controlplane.gateway.assembler import Assembler, Piece
from controlplane.gateway.auth import salt_of
from controlplane.gateway.errors import ApiError, invalid, told
from controlplane.gateway.params import Wanted
from controlplane.gateway.service import TENANT, Gateway, ServedModel
from controlplane.gateway.streams import Client, Stream
from controlplane.settings import nearest
from controlplane.text import MAX_SHOWN, shown
from transfer.errors import Overloaded, RemoteError
from transfer.said import Said, say
from transfer.terms import TokenIds, pack_tokens

CLASS_HEADER = "x-phaseplane-class"
_SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_DONE = b"data: [DONE]\n\n"


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Format(Protocol):
    """Bytes of one call's answer. index: the choice."""

    def chunk(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        """One SSE event, or two where the first piece of a choice needs an opening."""

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def body(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The whole answer, not streamed: every choice's pieces."""


class Call:
    """One HTTP request and its outputs: `n` for each prompt, in order of prompts."""

    def __init__(
        self, gateway: Gateway, model: ServedModel, request: web.Request, call_id: str, wanted: Wanted, num_prompts: int
    ) -> None:
        self.gateway, self.model, self.request = gateway, model, request
        self.call_id, self.wanted = call_id, wanted
        self.client = Client(lambda: _abort(request))
        self.streams: list[Stream] = []
        if gateway.stopping:
            raise told(503, say("ended.stopping"), retry_after_s=1.0)
        limits = gateway.config.limits
        if (total := num_prompts * wanted.n) > limits.max_choices:
            raise invalid(f"{total} choices in one call are over the limit of {limits.max_choices}; lower n", "n")
        try:
            gateway.router.check_room(total)
        except Overloaded as error:
            raise ApiError(429, str(error), code="overloaded", retry_after_s=error.retry_after_s) from None

    def start(self, prompts: Sequence[TokenIds], arrived_s: float) -> None:
        """Check every prompt against the context, then hand all outputs to the scheduler."""
        traffic_class = self._traffic_class()
        gateway, wanted = self.gateway, self.wanted
        tenant = self.request.get(TENANT, "")
        specs = list[RequestSpec]()
        for prompt in prompts:
            if not prompt:
                raise invalid("the prompt has no tokens; send some text", "prompt")
            packed = pack_tokens(prompt)
            for choice in range(wanted.n):
                specs.append(
                    RequestSpec(
                        request_id=self.call_id if not specs else f"{self.call_id}-{len(specs)}",
                        model=self.model.name,
                        tokens=packed,
                        sampling=wanted.sampling_for(choice, len(prompt), self.model.tokenizer.max_context),
                        traffic_class=traffic_class,
                        arrived_s=arrived_s,
                        arrived_at=time.time(),
                        timeout_s=gateway.config.limits.request_timeout_s,
                        salt=salt_of(gateway.config, tenant),
                        tenant=tenant,
                    )
                )
        for spec in specs:
            detokenizer = self.model.tokenizer.detokenizer()
            assembler = Assembler(detokenizer, wanted.stops, wanted.sampling.min_tokens, wanted.include_stop)
            self.streams.append(gateway.router.open(spec, self.client, assembler, wanted.stream))
        try:
            for spec in specs:
                gateway.control.post(Arrived(request=spec))
        except RemoteError as error:
            self._abandon(say("ended.no_scheduler"))
            raise ApiError(503, f"the request could not be scheduled: {error}", retry_after_s=1.0) from None

    async def answer(self, form: Format) -> web.StreamResponse:
        """The HTTP answer, to its end. Raises ApiError when it failed before the first byte."""
        try:
            return await (self._stream(form) if self.wanted.stream else self._collect(form))
        finally:
            self._abandon(say("ended.disconnected"))

    async def _collect(self, form: Format) -> web.Response:
        while not all(stream.ended for stream in self.streams):
            await self.client.wait()
            self._raise_failure()
        self._raise_failure()
        body = form.body([stream.take() for stream in self.streams], self._usage(self.streams))
        headers = {"X-Request-Id": self.call_id}
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _stream(self, form: Format) -> web.StreamResponse:
        streams = self.streams
        response: web.StreamResponse | None = None
        while True:
            await self.client.wait()
            failed = next((stream for stream in streams if stream.error is not None), None)
            if response is None:
                self._raise_failure()
                response = web.StreamResponse(headers=_SSE_HEADERS | {"X-Request-Id": self.call_id})
                await response.prepare(self.request)
            parts = list[bytes]()
            for index, stream in enumerate(streams):
                if stream.pieces:
                    usage = self._usage([stream]) if self.wanted.continuous_usage else None
                    parts.extend(form.chunk(index, piece, usage) for piece in stream.take())
            over = failed is not None or all(stream.ended for stream in streams)
            if failed is not None and failed.error is not None:
                parts.append(b"data: " + failed.error.body() + b"\n\n")
            elif over:
                if self.wanted.include_usage:
                    parts.append(form.usage_chunk(self._usage(streams)))
                parts.append(_DONE)
            try:
                await response.write(b"".join(parts))
                self._delivered(failed)
                if over:
                    await response.write_eof()
                    return response
            except ConnectionError:
                return response

    def _abandon(self, reason: Said) -> None:
        for stream in self.streams:
            self.gateway.router.abandon(stream, reason)

    def _delivered(self, failed: Stream | None) -> None:
        for stream in self.streams:
            if failed is not None and failed.error is not None:
                self.gateway.router.fail_stream(stream, failed.error, failed.outcome)
            self.gateway.router.delivered(stream)

    def _raise_failure(self) -> None:
        """One choice that failed fails the call: the others end with it."""
        failed = next((stream for stream in self.streams if stream.error is not None), None)
        if failed is not None and failed.error is not None:
            self._delivered(failed)
            raise failed.error

    def _usage(self, streams: Sequence[Stream]) -> Usage:
        firsts = streams[:: self.wanted.n]
        prompt = sum(stream.num_prompt_tokens for stream in firsts)
        output = sum(len(stream.output_ids) for stream in streams)
        cached = sum(stream.cached_tokens or 0 for stream in firsts)
        return Usage(prompt, output, prompt + output, {"cached_tokens": cached})

    def _traffic_class(self) -> str:
        name = self.request.headers.get(CLASS_HEADER)
        if name is None:
            return self.gateway.config.scheduler.default_class
        known = self.gateway.metrics.classes
        if name not in known:
            hint = f"; did you mean {nearest(name[:MAX_SHOWN], known)}?"
            raise invalid(
                f"header {CLASS_HEADER} names traffic class {shown(name)}, which is not known{hint}", CLASS_HEADER
            )
        return name


def model_of(gateway: Gateway, name: str | None) -> ServedModel:
    """The model that a request names, or the first. Raises ApiError 404 for one that is not served."""
    found = next((one for one in gateway.models if name in (None, one.served_name)), None)
    if found is None:
        served = " and ".join(repr(one.served_name) for one in gateway.models)
        raise ApiError(
            404, f"model {shown(name or '')} does not exist here; this server serves {served}",
            param="model", code="model_not_found",
        )  # fmt: skip
    return found


def json_response(value: Any, request_id: str | None = None) -> web.Response:
    """Any msgspec-encodable value as JSON."""
    headers = {"X-Request-Id": request_id} if request_id else None
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", headers=headers)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
