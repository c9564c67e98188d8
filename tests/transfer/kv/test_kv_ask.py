"""Questions to a pool: answered by its role, refused in a sentence, ended by their deadline or with the connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kv_helpers import FINGERPRINT, TIMEOUT_S, Pair, make_arena, peer_of, proxied, until

from transfer.errors import KvTransferFailed
from transfer.kv.links.inproc import InprocKvNetwork
from transfer.kv.port import KvAnswer, KvAsk, KvAskKind

NAMES = [bytes([number]) * 32 for number in range(3)]


def make_ask(**changes: Any) -> KvAsk:
    values: dict[str, Any] = {
        "kind": KvAskKind.LOOKUP, "source": "client", "target_epoch": 11, "fingerprint": FINGERPRINT,
        "hashes": tuple(NAMES),
    }  # fmt: skip
    return KvAsk(**(values | changes))


ASKS = [
    make_ask(),
    make_ask(kind=KvAskKind.PIN, name="client/p1", ttl_s=3.5),
    make_ask(kind=KvAskKind.UNPIN, name="client/p1", hashes=()),
    make_ask(kind=KvAskKind.STATS, target_epoch=0, fingerprint=b"", hashes=()),
]


@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask.kind)
async def test_a_question_is_answered_by_the_role(ask: KvAsk):
    async with Pair(1, fingerprint=FINGERPRINT) as pair:
        answer = await pair.prefill.ask(pair.peer, ask, TIMEOUT_S)
        assert answer == KvAnswer(epoch=11, num_blocks=len(ask.hashes), stats={"hits": 0.5})
        assert pair.role.asked == [ask]
        assert pair.prefill.num_streams == 0


async def test_many_questions_at_once_get_their_own_answers():
    async with Pair(1) as pair:
        asks = [make_ask(hashes=tuple(NAMES[: number % 4])) for number in range(100)]
        answers = await asyncio.gather(*(pair.prefill.ask(pair.peer, ask, TIMEOUT_S) for ask in asks))
        assert [answer.num_blocks for answer in answers] == [number % 4 for number in range(100)]


@pytest.mark.parametrize(
    ("changes", "words"), [({"target_epoch": 3}, "is in epoch 11"), ({"fingerprint": b"f" * 32}, "KV fingerprint")]
)
async def test_a_question_for_another_life_or_model_is_refused(changes: dict[str, Any], words: str):
    async with Pair(1, fingerprint=FINGERPRINT) as pair:
        with pytest.raises(KvTransferFailed, match=words):
            await pair.prefill.ask(pair.peer, make_ask(**changes), TIMEOUT_S)
        assert pair.role.asked == []


async def test_the_role_refuses_in_its_own_words():
    async with Pair(1) as pair:
        pair.role.refuse_ask = "decode keeps no blocks for others"
        with pytest.raises(KvTransferFailed, match="decode keeps no blocks for others"):
            await pair.prefill.ask(pair.peer, make_ask(), TIMEOUT_S)
        pair.decode.delegate = None
        with pytest.raises(KvTransferFailed, match="has no role yet"):
            await pair.prefill.ask(pair.peer, make_ask(), TIMEOUT_S)


async def test_a_question_nobody_answers_ends_at_its_deadline():
    async with Pair(1) as pair, proxied(pair) as (proxy, peer):
        await pair.prefill.ask(peer, make_ask(), TIMEOUT_S)
        proxy.hold_at = proxy.passed
        with pytest.raises(KvTransferFailed, match=r"did not answer within 0\.2 s"):
            await pair.prefill.ask(peer, make_ask(), 0.2)
        assert pair.prefill.num_streams == 0
        proxy.released.set()  # its late answer means nothing
        await until(lambda: len(pair.role.asked) == 2)
        assert (await pair.prefill.ask(peer, make_ask(), TIMEOUT_S)).num_blocks == 3


async def test_a_lost_connection_ends_a_question_at_once():
    async with Pair(1, stall_s=60.0) as pair, proxied(pair) as (proxy, peer):
        await pair.prefill.ask(peer, make_ask(), TIMEOUT_S)
        proxy.hold_at = proxy.passed
        task = asyncio.create_task(pair.prefill.ask(peer, make_ask(), 30.0))
        await until(lambda: pair.prefill.num_streams == 1)
        proxy.cut()
        with pytest.raises(KvTransferFailed):
            await task


async def test_in_virtual_time_too():
    network = InprocKvNetwork()
    here = network.port(instance_id="client", epoch=1, arena=make_arena(1))
    there = network.port(instance_id="pool", epoch=11, arena=make_arena(1))
    await here.start()
    await there.start()
    with pytest.raises(KvTransferFailed, match="has no role yet"):
        await here.ask(peer_of(there), make_ask(), TIMEOUT_S)
    await here.close()
    await there.close()
