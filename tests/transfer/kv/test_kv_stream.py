"""The two halves of a stream: credit is a bound, everything travels once, repeats harm nothing, gaps are refused."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_helpers import TINY

from transfer.errors import IllegalTransition, InvalidValue, KvCorrupt, KvTransferFailed, ProtocolError
from transfer.kv.frames import Ack, Credit, Grant, Nack, Refuse, Slab
from transfer.kv.port import KvTrailer
from transfer.kv.stream import RECEIVE_TABLE, SEND_TABLE, RecvStream, SendLimits, SendStream
from transfer.kv.table import BlockTable

BLOCK = 2 * TINY.slab_bytes
TRAILER = KvTrailer(num_tokens=4)


def sending(blocks: list[int], *, first_block: int = 0, slab_blocks: int = 100, stall_s: float = 10.0) -> SendStream:
    limits = SendLimits(slab_bytes=slab_blocks * BLOCK, mapped_slab_bytes=slab_blocks * BLOCK, stall_s=stall_s)
    return SendStream(1, TINY, first_block, blocks, limits, 0.0)


def receiving(blocks: list[int], *, window: int = 8, stall_s: float = 10.0) -> RecvStream:
    return RecvStream(1, TINY, blocks, window=window * BLOCK, stall_s=stall_s, now=0.0)


def grant(window: int = 100, skip: tuple[int, ...] = ()) -> Grant:
    return Grant(stream=1, window=window * BLOCK, skip=skip, mapped=False, checksums=True)


def as_slab(layer: int, first: int, count: int) -> Slab:
    return Slab(stream=1, layer=layer, first=first, count=count, checksum=0)


def take(stream: RecvStream, slab: Slab, now: float = 0.0) -> bool:
    """What a driver does with a slab; whether it was new."""
    new = stream.expect(slab, slab.count * BLOCK, now)
    if new:
        stream.landed(slab)
    return new


@settings(max_examples=200)
@given(
    blocks=st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=14),
    skipped=st.sets(st.integers(0, 13)),
    window=st.integers(1, 20),
    slab_blocks=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_credit_is_never_exceeded_and_everything_arrives_once(blocks, skipped, window, slab_blocks, seed):
    rng = random.Random(seed)
    sender = sending(blocks, first_block=5, slab_blocks=slab_blocks)
    receiver = receiving([-1 if i in skipped else 100 + i for i in range(len(blocks))], window=window)
    pushes = [(layer, i) for layer in range(TINY.num_layers) for i in range(len(blocks))]
    rng.shuffle(pushes)
    to_receiver: deque[Slab] = deque()
    to_sender: deque[Grant | Credit] = deque([receiver.grant()])
    sent: Counter[tuple[int, int]] = Counter()
    consumed = commit = 0

    while not (sender.state == "committed" and not to_receiver):
        moves = [name for name, can in (("push", pushes), ("hear", to_sender), ("land", to_receiver)) if can]
        match rng.choice([*moves, "send"]):
            case "push":
                layer, index = pushes.pop()
                sender.push(layer, 5 + index, rng.randint(1, len(blocks) - index))  # overlaps what was pushed before
                if not pushes:
                    sender.commit(TRAILER)
            case "hear":
                sender.receive(to_sender.popleft(), 0.0)
            case "land":
                slab = to_receiver.popleft()
                assert take(receiver, slab)
                consumed += slab.count * BLOCK
                if credit := receiver.credit(0.0):
                    to_sender.append(credit)
            case "send":
                slab = sender.next_slab(0.0)
                if slab is not None:
                    layer, first, count = slab
                    assert count <= slab_blocks
                    sent.update((layer, first + step) for step in range(count))
                    to_receiver.append(as_slab(*slab))
                commit += sender.next_commit(0.0) is not None
                assert sender.sent_bytes - consumed <= receiver.window

    assert commit == 1
    wanted = [i for i in range(len(blocks)) if i not in skipped]
    assert sent == Counter((layer, i) for layer in range(TINY.num_layers) for i in wanted)
    assert sender.sent_bytes == len(wanted) * TINY.num_layers * BLOCK
    assert receiver.commit() is None
    sender.receive(Ack(stream=1), 0.0)
    assert (sender.state, receiver.state) == ("done", "done")


@given(st.lists(st.integers(0, 40), unique=True, max_size=20), st.data())
def test_runs_are_the_blocks_in_order_and_as_few_as_can_be(blocks: list[int], data: st.DataObject):
    table = BlockTable(blocks)
    first = data.draw(st.integers(0, len(blocks)))
    count = data.draw(st.integers(0, len(blocks) - first))
    runs = table.runs(first, count)
    assert [block + step for block, length in runs for step in range(length)] == blocks[first : first + count]
    assert all(a[0] + a[1] != b[0] for a, b in itertools.pairwise(runs))


def test_pushes_that_touch_become_one_slab():
    sender = sending([4, 5, 6, 9])
    sender.push(0, 0, 2)
    sender.push(0, 2, 2)
    sender.receive(grant(), 0.0)
    assert sender.next_slab(0.0) == (0, 0, 4)
    assert sender.table.runs(0, 4) == [(4, 3), (9, 1)]
    assert sender.next_slab(0.0) is None


def test_nothing_is_sent_before_the_grant():
    sender = sending([1, 2])
    sender.push(0, 0, 2)
    assert sender.next_slab(0.0) is None
    sender.receive(grant(), 0.0)
    assert sender.next_slab(0.0) == (0, 0, 2)


def test_pushes_outside_the_offer_are_refused():
    sender = sending([1, 2], first_block=3)
    for layer, first, count in ((3, 3, 1), (-1, 3, 1), (0, 2, 1), (0, 4, 2), (0, 3, -1)):
        with pytest.raises(InvalidValue, match="were not offered"):
            sender.push(layer, first, count)


def test_a_commit_of_less_than_was_offered_names_the_gap():
    sender = sending([1, 2, 3], first_block=7)
    sender.push(0, 7, 3)
    sender.push(1, 7, 2)
    with pytest.raises(KvTransferFailed, match="block 9 of layer 1"):
        sender.commit(TRAILER)


def test_a_push_after_the_commit_is_a_bug():
    sender = sending([])
    sender.commit(TRAILER)
    with pytest.raises(IllegalTransition):
        sender.push(0, 0, 0)


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (Refuse(stream=1, reason="no room"), KvTransferFailed),
        (Nack(stream=1, reason="no room", corrupt=False), KvTransferFailed),
        (Nack(stream=1, reason="no room", corrupt=True), KvCorrupt),
    ],
)
def test_a_no_ends_the_sending(frame, kind):
    sender = sending([1, 2])
    sender.push(0, 0, 1)
    sender.receive(frame, 0.0)
    sender.push(0, 1, 1)
    sender.receive(grant(), 0.0)
    assert sender.over
    assert isinstance(sender.failure, kind)
    assert "no room" in str(sender.failure)
    assert sender.next_slab(0.0) is None
    assert sender.next_commit(0.0) is None


@pytest.mark.parametrize(
    "frame",
    [
        Ack(stream=1),
        Credit(stream=1, allowed=10**9),
    ],
)
def test_an_answer_that_cannot_be_is_a_protocol_error(frame):
    sender = sending([1])
    sender.receive(grant(4), 0.0)
    with pytest.raises(ProtocolError):
        sender.receive(frame, 0.0)


@pytest.mark.parametrize(
    "bad", [Grant(stream=1, window=BLOCK - 1, skip=(), mapped=False, checksums=True), grant(9, (5,))]
)
def test_a_grant_that_cannot_be_is_a_protocol_error(bad: Grant):
    with pytest.raises(ProtocolError):
        sending([1]).receive(bad, 0.0)


def test_repeated_answers_change_nothing():
    sender = sending([1, 2, 3, 4, 5, 6], slab_blocks=4)
    sender.push(0, 0, 6)
    for _ in range(2):
        sender.receive(grant(4), 0.0)
    assert sender.next_slab(0.0) == (0, 0, 4)
    assert sender.next_slab(0.0) is None
    for _ in range(2):
        sender.receive(Credit(stream=1, allowed=5 * BLOCK), 0.0)
    assert sender.next_slab(0.0) == (0, 4, 1)
    assert sender.next_slab(0.0) is None


def test_a_repeated_slab_goes_nowhere():
    receiver = receiving([7, 8])
    assert take(receiver, as_slab(0, 0, 2))
    assert not take(receiver, as_slab(0, 0, 2))
    assert receiver.received_bytes == 2 * BLOCK


def test_a_layer_is_complete_once():
    receiver = receiving([7, -1, 8])
    completed = []
    for slab in (as_slab(0, 0, 1), as_slab(1, 2, 1), as_slab(0, 2, 1), as_slab(1, 0, 1)):
        assert receiver.expect(slab, BLOCK, 0.0)
        completed.append(receiver.landed(slab))
    assert completed == [False, False, True, True]
    assert receiver.wanted == [7, 8]


def test_a_gap_at_the_commit_is_named():
    receiver = receiving([7, 8])
    take(receiver, as_slab(0, 0, 2))
    take(receiver, as_slab(1, 0, 1))
    sentence = receiver.commit()
    assert sentence == "3 slabs are missing at the commit, the first is offered block 1 of layer 1"
    assert receiver.state == "failed"


@pytest.mark.parametrize(
    ("slab", "payload"),
    [
        (as_slab(3, 0, 1), BLOCK),
        (as_slab(-1, 0, 1), BLOCK),
        (as_slab(0, -1, 1), BLOCK),
        (as_slab(0, 1, 2), 2 * BLOCK),
        (as_slab(0, 0, 0), 0),
        (as_slab(0, 0, 1), BLOCK - 1),
        (as_slab(0, 0, 1), 0),
        (Slab(stream=1, layer=0, first=0, count=1, checksum=None), BLOCK),
    ],
)
def test_a_slab_that_cannot_be_is_a_protocol_error(slab: Slab, payload: int):
    with pytest.raises(ProtocolError):
        receiving([7, 8]).expect(slab, payload, 0.0)


def test_blocks_not_wanted_or_half_here_are_a_protocol_error():
    receiver = receiving([7, -1, 8])
    with pytest.raises(ProtocolError, match="unasked"):
        receiver.expect(as_slab(0, 0, 2), 2 * BLOCK, 0.0)


def test_more_than_the_window_is_a_protocol_error():
    receiver = receiving(list(range(9)), window=8)
    with pytest.raises(ProtocolError, match="window"):
        receiver.expect(as_slab(0, 0, 9), 9 * BLOCK, 0.0)


def test_a_window_holds_four_blocks_at_least():
    assert receiving([1], window=0).window == 4 * BLOCK


def test_after_the_end_nothing_is_written():
    for event in ("fail", "revoke"):
        receiver = receiving([7])
        receiver.end(event)
        receiver.end(event)
        assert not receiver.expect(as_slab(0, 0, 1), BLOCK, 0.0)
        assert receiver.credit(0.0) is None


def test_a_silent_receiver_is_noticed_only_when_it_owes_something():
    sender = sending([1, 2, 3, 4, 5], stall_s=2.0)
    assert sender.stalled(1.9) is None
    assert "offered" in str(sender.stalled(2.0))
    sender.receive(grant(4), 2.0)
    assert sender.stalled(500.0) is None  # nothing queued: we are the slow one
    sender.push(0, 0, 5)
    assert sender.next_slab(500.0) == (0, 0, 4)
    assert sender.stalled(501.9) is None
    assert "granted" in str(sender.stalled(502.0))
    sender.receive(Credit(stream=1, allowed=5 * BLOCK), 502.0)
    assert sender.stalled(600.0) is None


def test_a_quiet_sender_says_that_it_lives():
    sender = sending([1], stall_s=8.0)
    assert not sender.alive_due(100.0)  # not granted: nobody waits for us
    sender.receive(grant(), 100.0)
    assert [sender.alive_due(now) for now in (100.0, 101.9, 102.0, 104.0)] == [True, False, True, True]


def test_a_starved_sender_that_lives_still_sees_the_receiver_stall():
    sender = sending([1, 2, 3, 4, 5], stall_s=2.0)
    sender.receive(grant(4), 0.0)
    sender.push(0, 0, 5)
    sender.next_slab(0.0)
    sentences = [sender.alive_due(at / 4) and sender.stalled(at / 4) for at in range(1, 10)]
    assert any(sentences)


def test_credit_comes_in_quarters_of_the_window_or_when_it_is_time():
    receiver = receiving(list(range(16)), window=16, stall_s=8.0)
    credits = []
    for index, now in enumerate((0.0, 0.1, 0.2, 0.3, 0.4, 1.2, 1.4, 9.0)):
        take(receiver, as_slab(0, index, 1), now)
        credit = receiver.credit(now)
        credits.append(credit and credit.allowed // BLOCK)
    assert credits == [None, None, None, 20, None, None, 23, 24]
    assert receiver.credit(99.0) is None


def test_a_silent_sender_is_noticed():
    receiver = receiving([7], stall_s=2.0)
    take(receiver, as_slab(0, 0, 1), 1.0)
    assert receiver.stalled(2.9) is None
    receiver.heard(2.9)
    assert receiver.stalled(4.8) is None
    assert "2 slabs missing" in str(receiver.stalled(4.9))


def test_an_illegal_move_tells_the_history():
    receiver = receiving([])
    assert receiver.commit() is None
    with pytest.raises(IllegalTransition, match="state done cannot take commit; its history: granted commit"):
        receiver.commit()


def test_the_tables_end():
    for table, finals in ((SEND_TABLE, {"done", "failed"}), (RECEIVE_TABLE, {"done", "failed"})):
        assert set(table.values()) - {state for state, _ in table} == finals


def test_reads_in_progress_keep_a_silent_stream_alive():
    stream = RecvStream(1, TINY, [0, 1], window=1 << 20, stall_s=10.0, now=0.0, direct=1 << 20)
    slab = Slab(stream=1, layer=0, first=0, count=2, checksum=5, runs=((0, 2),), generations=bytes(16))
    assert stream.expect(slab, 0, 1.0)
    stream.read_begun(slab)
    assert stream.reading
    assert stream.stalled(100.0) is None
    stream.landed(slab)
    assert not stream.reading
    assert stream.stalled(109.0) is None
    assert stream.stalled(110.0) is not None
