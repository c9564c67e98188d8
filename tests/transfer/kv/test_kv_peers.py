"""The real backends, within this process: Mooncake's transfer engine and NIXL. `make test-peers` runs these.

They skip where the package is not installed. Mooncake listens on every address: run them where there is only loopback.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator

import pytest
from kv_direct_helpers import FakeReader
from kv_helpers import LAYOUT, TIMEOUT_S, TRAILER, Pair, make_fetch, make_offer, proxied, push, push_all, until

from transfer.errors import KvTransferFailed
from transfer.kv.frames import RemoteHandle
from transfer.kv.links.direct import BACKENDS, Span
from transfer.kv.links.direct_ring import MAX_FAILURES, DirectRing, RingLimits

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MODULES = {"mooncake": "mooncake.engine", "nixl": "nixl._api"}
SOURCE, TARGET = [3, 1, 2, 9, 10, 11], [15, 14, 13, 4, 5, 6]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    try:
        importlib.import_module(MODULES[name])
    except ImportError as error:
        pytest.skip(f"{name} is not here ({error}); make test-peers installs it in .venv-peers")
    return name


@pytest.fixture
async def pair(backend: str) -> AsyncIterator[Pair]:
    async with Pair(16, direct=backend, ring_limits=RingLimits(read_s=4.0)) as pair:
        yield pair


def ring(pair: Pair) -> DirectRing:
    found = pair.decode._context.direct
    assert found is not None
    return found


async def test_pushes_are_read_by_the_backend(pair: Pair):
    async with proxied(pair) as (proxy, peer):
        for _ in range(3):
            pair.role.granted = list(TARGET)
            pair.target.buffer[:] = bytes(pair.target.buffer.nbytes)
            sender = await pair.prefill.open(peer, make_offer(6), SOURCE, TIMEOUT_S)
            push_all(sender, 0, 6)
            await sender.commit(TRAILER, TIMEOUT_S)
            assert pair.same(SOURCE, TARGET)
        assert proxy.passed < 60_000


async def test_fetches_are_read_by_the_backend(pair: Pair):
    names = [bytes([number]) * 32 for number in range(4)]
    pair.role.pool = dict(zip(names, [7, 8, 2, 5], strict=True))
    pair.target.buffer[:] = bytes(range(256)) * (pair.target.buffer.nbytes // 256)
    layers: list[int] = []
    count = await pair.prefill.fetch(
        pair.peer, make_fetch(names), [0, 1, 2, 3], TIMEOUT_S, lambda layer, _: layers.append(layer)
    )  # fmt: skip
    assert count == 4
    assert pair.same([0, 1, 2, 3], [7, 8, 2, 5])
    assert layers == list(range(-1, LAYOUT.num_layers))


async def test_over_several_links(backend: str):
    async with Pair(16, direct=backend, links=2) as pair:
        await push(pair, SOURCE, TARGET)
        assert pair.same(SOURCE, TARGET)


async def test_a_peer_whose_backend_is_gone_is_served_over_tcp(pair: Pair):
    await push(pair, SOURCE, TARGET)
    there = pair.prefill._context.direct
    assert there is not None
    assert there.handle is not None
    there._reader.stop()
    failures = 0
    while ring(pair).usable(there.handle):
        with pytest.raises(KvTransferFailed, match=f"{ring(pair)._reader.name} (could|did) not read"):
            await push(pair, SOURCE, TARGET, request_id=f"bad{failures}")
        failures += 1
        assert failures <= MAX_FAILURES
    pair.target.buffer[:] = bytes(pair.target.buffer.nbytes)
    await push(pair, SOURCE, TARGET, request_id="good")
    assert pair.same(SOURCE, TARGET)
    await until(lambda: not ring(pair)._running, 60.0)
    there._reader = FakeReader()  # it was stopped already


async def test_nonsense_from_a_peer_is_refused_not_believed(pair: Pair):
    here, there = ring(pair), pair.prefill._context.direct
    assert there is not None
    assert there.handle is not None
    good: RemoteHandle = there.handle
    size = pair.source.buffer.nbytes
    here._reader.read(good.descriptor, [Span(0, 0, 4096), Span(size - 4096, 4096, 4096)])
    assert bytes(here._staging[:8192]) == bytes(pair.source.buffer[:4096]) + bytes(pair.source.buffer[-4096:])
    for descriptor, spans in (
        (b"", [Span(0, 0, 4096)]),
        (b"\x00" * 500, [Span(0, 0, 4096)]),
        (good.descriptor[:-20], [Span(0, 0, 4096)]),
        (good.descriptor, [Span(size - 4096, 0, 8192)]),
        (good.descriptor, [Span(-1, 0, 4096)]),
    ):
        with pytest.raises(KvTransferFailed):
            here._reader.read(descriptor, spans)
    await push(pair, SOURCE, TARGET)
    assert pair.same(SOURCE, TARGET)
