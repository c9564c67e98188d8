"""vLLM's HTTP server as a client sees it: completions as streams, health, version, models, metrics.

Over TCP (with TCP_NODELAY, which aiohttp sets) or a unix socket. Every wait has a deadline; closing a stream aborts it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from nodes.engines.answers import read_body, why
from nodes.engines.vllm.completion import SseParser, read_error
from transfer.errors import EngineFailed, JobFailed

CONNECT_S = 10.0
IDLE_S = 600.0
"""A request may wait this long for its next token; vLLM queues what it has no room for."""
ASK_S = 5.0
MAX_ERROR_BYTES = 1 << 16
OK, BAD_REQUEST, SERVER_ERROR = 200, 400, 500
_METRIC = re.compile(r"^(vllm:[a-z_]+)(?:\{([^}]*)\})? ([0-9.eE+-]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class VllmLoad:
    """From vLLM's own metrics. kv_usage: part of its KV blocks that requests hold, 0 to 1."""

    running: int
    waiting: int
    kv_usage: float


class Rejected(JobFailed):
    """The server itself said that it will not serve the request: it is well."""


class VllmServer:
    """url: of its root. uds: the unix socket that it listens on, where it has no port."""

    def __init__(self, url: str, uds: Path | None = None) -> None:
        self.url = url.rstrip("/")
        connector = aiohttp.TCPConnector(limit=0) if uds is None else aiohttp.UnixConnector(str(uds), limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=IDLE_S)
        )
        self._running: set[aiohttp.ClientResponse] = set()

    async def complete(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """The data of each event. Raises Rejected when the request is refused, JobFailed when its stream breaks off."""
        try:
            async with self._session.post(
                f"{self.url}/v1/completions", json=body, allow_redirects=False
            ) as response:  # fmt: skip
                self._running.add(response)
                try:
                    async with aclosing(_events(response)) as events:
                        async for data in events:
                            yield data
                finally:
                    self._running.discard(response)
                    response.close()  # a stream that has not ended is thereby aborted
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise JobFailed(f"the request to vLLM broke off: {why(error)}") from None

    def break_off(self) -> None:
        """End every stream now: the engine is lost."""
        for response in list(self._running):
            response.close()

    async def is_healthy(self) -> bool:
        try:
            async with self._session.get(f"{self.url}/health", timeout=_ask()) as response:
                return response.status < BAD_REQUEST
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def version(self) -> str:
        return str((await self._ask("/version")).get("version", ""))

    async def models(self) -> dict[str, int]:
        """Longest context by served name; 0 where the server does not say."""
        listed = (await self._ask("/v1/models")).get("data") or []
        return {str(one["id"]): int(one.get("max_model_len") or 0) for one in listed if isinstance(one, dict)}

    async def load(self) -> VllmLoad:
        metrics = await self.metrics()
        return VllmLoad(
            running=int(metrics.get("vllm:num_requests_running", 0)),
            waiting=int(metrics.get("vllm:num_requests_waiting", 0)),
            kv_usage=metrics.get("vllm:kv_cache_usage_perc", 0.0),
        )

    async def metrics(self) -> dict[str, float]:
        """Gauges and counters by name, summed over labels."""
        sums: dict[str, float] = {}
        for name, _, value in _METRIC.findall(await self._text("/metrics")):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    async def cache_config(self) -> dict[str, str]:
        """The labels of vllm:cache_config_info: num_gpu_blocks, block_size, cache_dtype ..."""
        for name, labels, _ in _METRIC.findall(await self._text("/metrics")):
            if name == "vllm:cache_config_info":
                return dict(_LABEL.findall(labels))
        return {}

    async def close(self) -> None:
        self.break_off()
        await self._session.close()

    async def _ask(self, path: str) -> dict[str, Any]:
        try:
            found = msgspec.json.decode(await self._text(path))
        except msgspec.DecodeError as error:
            raise EngineFailed(f"{self.url}{path} did not answer with JSON ({error}); is it vLLM?") from None
        return found if isinstance(found, dict) else {}

    async def _text(self, path: str) -> str:
        """Raises EngineFailed when there is no such answer within ASK_S."""
        try:
            async with self._session.get(f"{self.url}{path}", timeout=_ask()) as response:
                if response.status >= BAD_REQUEST:
                    raise EngineFailed(f"{self.url}{path} answered {response.status}; is it vLLM?")
                return await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFailed(f"{self.url}{path} does not answer: {error or type(error).__name__}") from None


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    if response.status != OK:
        said = read_error(response.status, await read_body(response, MAX_ERROR_BYTES))
        raise Rejected(said) if response.status < SERVER_ERROR else JobFailed(said)
    parser = SseParser()
    async for data in response.content.iter_any():
        for event in parser.feed(data):
            yield event


def _ask() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=ASK_S)
