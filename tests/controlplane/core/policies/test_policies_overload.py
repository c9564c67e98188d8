"""Our policy where decode is what is short: a bad regime ends by itself, and late ones get what is left over."""

from __future__ import annotations

import pytest
from policy_kit import SLO, answer, asked, d, p

from controlplane.core.instance import Instance
from controlplane.core.placement import Block, Blocked
from controlplane.core.policies.goodput import placed
from controlplane.core.policies.line import AGED_S, CROWDED_S, free
from controlplane.core.policies.memory import LATE_SHARE, Memory
from controlplane.core.policies.protocol import Situation
from transfer.terms import Slo


def crowded(rows: int = 400, late: int = 0) -> Instance:
    """A decode far behind its objective, where nobody can be good any more; `late` rows have no pace to keep."""
    one = d("d0", rows=rows, context=rows * 4000)
    assert one.profile.decode_step_s(rows, rows * 4000) > 1.3 * SLO.tpot_s
    one.paces = {50_000: rows - late}
    return one


def test_nobody_joins_a_batch_that_is_behind_its_pace_though_its_rows_are_lost() -> None:
    found = answer("goodput", p("p0"), crowded())
    assert isinstance(found, Blocked)
    assert found.block is Block.ROOM
    assert isinstance(answer("goodput", p("p0"), crowded(), waited_s=9.0), Blocked), "nor one that is late"
    assert isinstance(answer("goodput", p("p0"), crowded(late=400)), Blocked), "nor beside late ones alone"
    memory = Memory()
    memory.late_s = 1.0
    assert isinstance(answer("goodput", p("p0"), crowded(), waited_s=9.0, memory=memory), Blocked)
    assert memory.kept_s < 0.0, "prefill time is not what it waits for"


def test_a_pace_that_no_batch_keeps_is_no_reason_to_wait() -> None:
    hopeless = Slo(ttft_s=2.0, tpot_s=0.0005)
    one = d("d0", rows=10, context=10_000)
    one.paces = {500: 10}
    assert isinstance(answer("goodput", p("p0"), one, slo=hopeless), list)


def test_one_that_waited_very_long_goes_beside_good_ones_while_few_there_are_late() -> None:
    waited_s = SLO.ttft_s + AGED_S + 1.0

    def near(late: int) -> Instance:
        one = d("d0", rows=100, context=100_000)
        step_s = one.profile.decode_step_s(101, 101_000)
        one.paces = {round(1.11 * step_s * 1e6): 100 - late}
        return one

    tight = Slo(ttft_s=SLO.ttft_s, tpot_s=1.11 * near(0).profile.decode_step_s(101, 101_000))
    few, many = round(LATE_SHARE * 100) - 1, round(LATE_SHARE * 100) + 5
    assert isinstance(answer("goodput", p("p0"), near(few), slo=tight, waited_s=waited_s), list)
    assert isinstance(answer("goodput", p("p0"), near(many), slo=tight, waited_s=waited_s), Blocked)
    soon = answer("goodput", p("p0"), near(few), slo=tight, waited_s=waited_s - 10.0)
    assert isinstance(soon, Blocked), "not before"


def test_one_that_is_late_is_charged_without_a_pace() -> None:
    for waited_s, tpot_us in ((0.0, 50_000), (9.0, 0)):
        found = answer("goodput", p("p0"), d("d0"), waited_s=waited_s)
        assert isinstance(found, list)
        assert found[0].charge_decode.tpot_us == tpot_us


def serve(at: Situation, memory: Memory) -> bool:
    found = answer("goodput", *at.group.prefills, *at.group.decodes, tokens=at.wanted.num_tokens, memory=memory,
                   waited_s=at.wanted.waited_s, now=at.now)  # fmt: skip
    return isinstance(found, list)


def test_a_long_prompt_that_is_late_leaves_those_that_can_be_good_their_bursts() -> None:
    long = asked(p("p0"), p("p1"), d("d0", num_blocks=100_000), tokens=100_000, waited_s=9.0, now=1.0)
    quiet, busy = Memory(), Memory()
    busy.timely_s.add(12.0, 1.0)  # 0.8 of two instances on average
    assert serve(long, quiet), "nobody wants the time"
    assert quiet.kept_s < 0.0
    busy.late_s, busy.allowance_s = -1.0, lambda now, num_servers, share: -1.0  # type: ignore[method-assign]
    assert not serve(long, busy)
    assert busy.kept_s == 1.0, "operators are told that an idle instance is kept from it"
    short = asked(p("p0"), p("p1"), d("d0"), tokens=1000, waited_s=9.0, now=1.0)
    assert serve(short, busy), "a short one is in nobody's way"


@pytest.mark.parametrize(("rows", "kept"), [(0, True), (3, False)])
def test_time_is_kept_only_where_an_instance_is_idle(rows: int, kept: bool) -> None:
    memory = Memory()
    memory.late_s = -1.0
    memory.spent.add(20.0, 1.0)  # others are served only just in time
    one = asked(p("p0", rows=rows), d("d0"), waited_s=9.0, now=1.0)
    assert not serve(one, memory)
    assert (memory.kept_s == 1.0) is kept


@pytest.mark.parametrize(("waited_s", "served"), [(9.0, False), (SLO.ttft_s + AGED_S + 1.0, True)])
def test_who_has_waited_very_long_has_more_of_the_time(waited_s: float, served: bool) -> None:
    memory = Memory()
    memory.late_s = -1.0
    memory.timely_s.add(12.0, 3.0)
    long = asked(p("p0"), p("p1"), d("d0", num_blocks=100_000), tokens=100_000, waited_s=waited_s, now=3.0)
    assert serve(long, memory) is served


def test_time_left_over_is_not_taken_from_the_allowance() -> None:
    memory = Memory()
    at = asked(p("p0"), d("d0"), memory=memory)
    found = answer("goodput", p("p0"), d("d0"))
    assert isinstance(found, list)
    at.late = at.spare = True
    placed(at, found[0])
    assert memory.late_s == 0.0
    assert memory.spare_s.at(0.0) > 0.0


def test_nobody_is_asked_for_until_one_leaves_or_a_moment_later() -> None:
    memory, one = Memory(), crowded()
    at = asked(p("p0"), one, memory=memory)
    assert isinstance(answer("goodput", p("p0"), one, memory=memory), Blocked)
    assert not free(at.group, CROWDED_S / 2, memory)
    assert free(at.group, CROWDED_S * 2, memory)
    one.rows -= 1
    assert free(at.group, CROWDED_S / 2, memory)
