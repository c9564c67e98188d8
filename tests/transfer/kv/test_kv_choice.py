"""Link choice: the least (in flight + slab) / bandwidth; silent links are paused, and come back after a pause."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.errors import IllegalTransition
from transfer.kv.links.choice import EXPLORE_EVERY, LINK_TABLE, LinkChoice, LinkLimits

LIMITS = LinkLimits(stuck_s=1.0, backoff_s=0.5, longest_backoff_s=4.0, window_bytes=1000)


def choice_of(num_links: int, limits: LinkLimits = LIMITS) -> LinkChoice[str]:
    """All up at time 0, each measured at 1000 B/s."""
    choice: LinkChoice[str] = LinkChoice(limits)
    for link in range(num_links):
        choice.add(link, -1.0)
        choice.probe(link)
        choice.join(link, -1.0)
        choice.confirmed(link, send(choice, link, 1000, -1.0), 0.0)
    return choice


def send(choice: LinkChoice[str], link: int, num_bytes: int, now: float, item: str = "") -> int:
    number = choice.next_number(link)
    choice.sent(link, number, num_bytes, item, now)
    return number


def test_equal_links_take_turns():
    choice = choice_of(3)
    taken = []
    for _ in range(6):
        link = choice.best(100)
        assert link is not None
        taken.append(link)
        send(choice, link, 100, 1.0)
    assert taken == [0, 1, 2, 0, 1, 2]


def test_a_faster_link_gets_its_share():
    """Two links of 3000 and 1000 B/s, always busy: the first carries about three quarters."""
    choice, speeds, carried = choice_of(2), (3000.0, 1000.0), [0, 0]
    free_s, flying = [0.0, 0.0], []
    now = 0.0
    for _ in range(2000):
        link = choice.best(100)
        assert link is not None
        if choice.has_room(link, 100):
            free_s[link] = max(free_s[link], now) + 100 / speeds[link]
            flying.append((free_s[link], link, send(choice, link, 100, now)))
            continue
        flying.sort()
        now, done, number = flying.pop(0)
        choice.confirmed(done, number, now)
        carried[done] += 100
    assert carried[0] / sum(carried) == pytest.approx(0.75, abs=0.03)


def test_a_link_not_measured_yet_gets_one_slab_at_a_time():
    choice = choice_of(2)
    choice.add(2, 0.0)
    choice.probe(2)
    choice.join(2, 0.0)
    assert choice.best(100) == 2
    assert choice.safest() == 0
    number = send(choice, 2, 100, 0.0)
    assert [choice.best(100), choice.best(10_000)] == [0, 0]
    choice.confirmed(2, number, 0.01)  # 10,000 B/s
    send(choice, 2, 900, 0.01)
    assert choice.best(100) in (0, 1, 2)
    assert choice.best(900) == 2


def test_a_link_that_seemed_slow_is_measured_anew_now_and_then():
    choice, now = choice_of(2), 1000.0
    choice.confirmed(1, send(choice, 1, 100, 0.0), 1000.0)  # 750 B/s now
    taken = []
    for _ in range(3 * EXPLORE_EVERY):
        link = choice.best(100)
        assert link is not None
        taken.append(link)
        number = send(choice, link, 100, now)
        now += 1e-4 if link == 0 else 1.0
        choice.confirmed(link, number, now)
    assert taken.count(1) == 3


def test_the_window_bounds_a_link_but_one_slab_always_may():
    choice = choice_of(1)
    assert choice.has_room(0, 5000)
    send(choice, 0, 600, 0.0)
    assert choice.has_room(0, 400)
    assert not choice.has_room(0, 401)


def test_what_a_failed_link_owes_is_returned_in_order():
    choice = choice_of(2)
    numbers = [send(choice, 0, 100, 0.0, item) for item in "abc"]
    choice.confirmed(0, numbers[0], 0.1)
    assert [owed.item for owed in choice.fail(0, 0.2)] == ["b", "c"]
    assert choice.up == [1]
    assert choice.best(1) == 1
    choice.fail(1, 0.3)
    assert choice.best(1) is None


def test_what_was_never_sent_is_not_owed():
    choice = choice_of(1)
    kept, gone = send(choice, 0, 100, 0.0, "kept"), send(choice, 0, 900, 0.0, "gone")
    choice.forget(0, {gone: None})
    assert choice.has_room(0, 900)
    choice.confirmed(0, kept, 0.1)
    assert not choice.any_owed


def test_a_silent_link_is_stuck_only_if_another_proves_the_receiver_reads():
    choice = choice_of(3)
    send(choice, 0, 0, 1.0)
    assert choice.to_ask(1.4) == []
    assert choice.to_ask(1.6) == [1, 2]
    assert choice.stuck(9.0) == []  # nobody has said anything: the receiver may be busy
    number = send(choice, 1, 0, 1.6)
    choice.confirmed(1, number, 1.7)
    assert choice.stuck(1.9) == []
    assert choice.stuck(2.1) == [0]


def test_a_proof_from_before_does_not_count():
    choice = choice_of(2)
    number = send(choice, 1, 0, 0.5)
    send(choice, 0, 0, 1.0)
    choice.confirmed(1, number, 1.1)  # read, but sent before link 0 began to owe
    assert choice.stuck(5.0) == []


def test_a_slow_link_is_given_the_time_its_bandwidth_explains():
    choice = choice_of(2)
    send(choice, 0, 1000, 0.0)  # 1 s at 1000 B/s: 1 + 4 s are allowed
    for now in (1.0, 4.9, 5.1):
        choice.confirmed(1, send(choice, 1, 0, now), now)
        assert choice.stuck(now) == ([0] if now > 5 else [])
    choice.fail(0, 5.1)  # measured: at most 1000 bytes in 5.1 s
    choice.probe(0)
    choice.join(0, 6.0)
    send(choice, 0, 1000, 6.0)
    choice.confirmed(1, send(choice, 1, 0, 20.0), 20.0)
    assert choice.stuck(20.0) == []
    assert choice.stuck(6.0 + 1.0 + 4 * 5.1 + 0.1) == [0]


def test_pauses_double_up_to_a_bound_and_start_anew_after_a_good_time():
    choice = choice_of(1)
    now, pauses = 0.1, []
    choice.fail(0, now)
    for _ in range(6):
        due_s = choice.next_due_s()
        assert due_s is not None
        assert choice.due(due_s - 0.01) == []
        assert choice.due(due_s) == [0]
        pauses.append(round(due_s - now, 6))
        choice.probe(0)
        now = due_s + 0.1
        choice.fail(0, now)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    choice.probe(0)
    choice.join(0, 100.0)
    choice.fail(0, 103.0)  # well for less than its pause
    assert choice.next_due_s() == 107.0
    choice.probe(0)
    choice.join(0, 110.0)
    choice.fail(0, 120.0)
    assert choice.next_due_s() == 120.5


def test_illegal_moves_say_how_it_came_to_them():
    choice = choice_of(1)
    with pytest.raises(IllegalTransition, match="paused probe -> probing join"):
        choice.join(0, 1.0)


@given(st.integers(0, 10_000))
def test_random_walks_keep_the_books(seed: int):
    """In flight is the sum of what is owed, every item is confirmed, returned or owed, states follow the table."""
    draw = random.Random(seed)
    choice = choice_of(3)
    sent, settled, now = 0, 0, 0.0
    last = {0: 0, 1: 0, 2: 0}
    for _ in range(200):
        now += draw.random()
        link = draw.randrange(3)
        one, event = choice._links[link], draw.choice(["send", "confirm", "fail", "probe", "join"])
        if event == "send" and one.state == "up":
            last[link] = send(choice, link, draw.randrange(300), now)
            sent += 1
        elif event == "confirm" and one.owed:
            before = len(one.owed)
            choice.confirmed(link, draw.randint(one.owed[0].number - 1, last[link]), now)
            settled += before - len(one.owed)
        elif event == "fail" and (one.state, event) in LINK_TABLE:
            settled += len(choice.fail(link, now))
        elif event == "probe" and one.state == "paused":
            choice.probe(link)
        elif event == "join" and one.state == "probing":
            choice.join(link, now)
        for each in choice._links.values():
            assert each.in_flight_bytes == sum(owed.num_bytes for owed in each.owed)
            assert each.bytes_per_s >= 0
            assert each.state == "up" or not each.owed
    assert sent == settled + sum(len(one.owed) for one in choice._links.values())
