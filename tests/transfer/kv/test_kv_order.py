"""Control frames over several links: each once, in order, in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.errors import ProtocolError
from transfer.kv.frames import Abort
from transfer.kv.links.order import FRAME_COST_BYTES, MAX_EARLY_BYTES, InOrder


@given(st.integers(0, 40).flatmap(lambda count: st.permutations([*range(count), *range(0, count, 3)])))
def test_any_order_with_repeats_comes_out_once_and_sorted(arrivals: list[int]):
    order, heard = InOrder(), []
    for number in arrivals:
        heard += [frame.stream for frame in order.take(number, Abort(stream=number, reason=""), 10)]
    assert heard == sorted(dict.fromkeys(arrivals))
    assert (order.expected, order.early_bytes) == (len(heard), 0)


def test_what_waits_is_bounded():
    order, size = InOrder(), MAX_EARLY_BYTES // 4
    for number in range(1, 4):
        assert list(order.take(number, Abort(stream=number, reason=""), size - FRAME_COST_BYTES)) == []
    assert list(order.take(4, Abort(stream=4, reason=""), size - FRAME_COST_BYTES)) == []
    with pytest.raises(ProtocolError, match="5 control frames wait for number 0"):
        list(order.take(5, Abort(stream=5, reason=""), 0))
