"""Which of several links to one peer takes the next slab, and what is done with a link that does badly. Pure.

A link is measured by what the receiver confirms to have read. The next slab goes where (in flight + slab) / bandwidth
is least (as Mooncake's transfer engine chooses), now and then to an idle link, to measure it anew; a link that fails,
or owes and is silent while another proves that the receiver reads, is paused and tried again after a growing pause.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from transfer.errors import IllegalTransition

Item = TypeVar("Item")

EXPLORE_EVERY = 100
"""One slab in so many goes to the idle link that was silent for longest, however slow it seemed."""

LINK_TABLE = {
    ("paused", "probe"): "probing",
    ("probing", "join"): "up",
    ("probing", "fail"): "paused",
    ("up", "fail"): "paused",
}


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """stuck_s: how long a link may owe in silence, beyond 4 times what its bandwidth explains. backoff_s: the first
    pause, doubled each time up to longest_backoff_s. window_bytes: in flight on one link at most (one slab always may).
    """

    stuck_s: float = 1.0
    backoff_s: float = 0.25
    longest_backoff_s: float = 30.0
    window_bytes: int = 4 << 20
    smoothing: float = 0.25


@dataclass(frozen=True, slots=True)
class Owed(Generic[Item]):
    """Sent on a link and not confirmed. number: grows on each link. sent_s: when."""

    number: int
    num_bytes: int
    sent_s: float
    item: Item


@dataclass(slots=True)
class _Link(Generic[Item]):
    backoff_s: float
    bytes_per_s: float = 0.0
    """0.0: not measured since it joined; it gets one slab at a time, if there are others."""
    at_most_bytes_per_s: float = float("inf")
    """What it did when it was last given up for its silence: it may just be slow."""
    state: str = "paused"
    history: tuple[str, ...] = ()
    owed: deque[Owed[Item]] = field(default_factory=deque)
    in_flight_bytes: int = 0
    last_number: int = 0
    confirmed_s: float = 0.0
    proved_s: float = float("-inf")
    """When the newest that was confirmed had been sent: the receiver has read since."""
    joined_s: float = 0.0
    retry_s: float = 0.0

    def owing_since(self) -> float:
        return max(self.owed[0].sent_s, self.confirmed_s)

    def pace(self) -> float:
        return min(self.bytes_per_s or float("inf"), self.at_most_bytes_per_s)


class LinkChoice(Generic[Item]):
    """Links by number, 0 and up. `now`: seconds on any monotonic clock."""

    def __init__(self, limits: LinkLimits) -> None:
        self.limits = limits
        self._links: dict[int, _Link[Item]] = {}
        self._num_slabs = 0

    def add(self, link: int, now: float) -> None:
        """A link that may be tried at once."""
        self._links[link] = _Link(self.limits.backoff_s, retry_s=now)

    def remove(self, link: int) -> None:
        """It will not come back."""
        del self._links[link]

    def state(self, link: int) -> str:
        return self._links[link].state

    @property
    def up(self) -> list[int]:
        return [number for number, link in self._links.items() if link.state == "up"]

    def probe(self, link: int) -> None:
        """It is being connected."""
        self._move(link, "probe")

    def join(self, link: int, now: float) -> None:
        """It is connected."""
        self._move(link, "join")
        one = self._links[link]
        one.joined_s = one.confirmed_s = now

    def fail(self, link: int, now: float) -> list[Owed[Item]]:
        """It is lost, or could not be had. Returns what it owes, to be sent over the others."""
        self._move(link, "fail")
        one = self._links[link]
        if one.joined_s and now - one.joined_s > one.backoff_s:  # it was well for longer than it was away
            one.backoff_s = self.limits.backoff_s
        one.retry_s = now + one.backoff_s
        one.backoff_s = min(2 * one.backoff_s, self.limits.longest_backoff_s)
        owed = list(one.owed)
        if one.in_flight_bytes:
            one.at_most_bytes_per_s = one.in_flight_bytes / max(now - one.owing_since(), 1e-3)
        one.bytes_per_s = 0.0
        one.owed.clear()
        one.in_flight_bytes = 0
        one.joined_s = 0.0
        return owed

    def due(self, now: float) -> list[int]:
        """Paused links whose pause is over."""
        return [number for number, link in self._links.items() if link.state == "paused" and link.retry_s <= now]

    def next_due_s(self) -> float | None:
        """When the next pause is over."""
        return min((link.retry_s for link in self._links.values() if link.state == "paused"), default=None)

    # --- slabs ----------------------------------------------------------------------------------------------------

    def best(self, num_bytes: int) -> int | None:
        """The link that should carry the next `num_bytes` of a slab; None when none is up."""
        up = {number: link for number, link in self._links.items() if link.state == "up"}
        idle = {number: link for number, link in up.items() if not link.in_flight_bytes}
        for number, link in idle.items():
            if not link.bytes_per_s:
                return number
        if idle and self._num_slabs % EXPLORE_EVERY == EXPLORE_EVERY - 1:
            return min(idle, key=lambda number: idle[number].confirmed_s)
        return _least(up, num_bytes)

    def safest(self) -> int | None:
        """The link for what must not be late: the one that would be done with it first, as far as is known."""
        return _least({number: link for number, link in self._links.items() if link.state == "up"}, 1)

    def has_room(self, link: int, num_bytes: int) -> bool:
        in_flight = self._links[link].in_flight_bytes
        return not in_flight or in_flight + num_bytes <= self.limits.window_bytes

    def next_number(self, link: int) -> int:
        one = self._links[link]
        one.last_number += 1
        return one.last_number

    def sent(self, link: int, number: int, num_bytes: int, item: Item, now: float) -> None:
        """`item` is on its way with this number. num_bytes: of KV; 0 is owed too, but measures nothing."""
        one = self._links[link]
        one.owed.append(Owed(number, num_bytes, now, item))
        self._num_slabs += num_bytes > 0
        one.in_flight_bytes += num_bytes

    def confirmed(self, link: int, number: int, now: float) -> None:
        """The receiver has read everything up to `number`. A repeat changes nothing."""
        one = self._links[link]
        if not one.owed or one.owed[0].number > number:
            return
        since, num_bytes = one.owing_since(), 0
        while one.owed and one.owed[0].number <= number:
            owed = one.owed.popleft()
            num_bytes += owed.num_bytes
            one.proved_s = owed.sent_s
        one.in_flight_bytes -= num_bytes
        one.confirmed_s = now
        if num_bytes and now > since:
            measured = num_bytes / (now - since)
            weight = self.limits.smoothing if one.bytes_per_s else 1.0
            one.bytes_per_s += weight * (measured - one.bytes_per_s)
            one.at_most_bytes_per_s = float("inf")

    def forget(self, link: int, numbers: dict[int, None]) -> None:
        """These were never sent after all."""
        one = self._links[link]
        one.in_flight_bytes -= sum(owed.num_bytes for owed in one.owed if owed.number in numbers)
        one.owed = deque(owed for owed in one.owed if owed.number not in numbers)

    # --- liveness -------------------------------------------------------------------------------------------------

    @property
    def any_owed(self) -> bool:
        return any(link.owed for link in self._links.values())

    def stuck(self, now: float) -> list[int]:
        """Links that owe and are silent for too long, though another has shown since that the receiver reads.

        When none has, the receiver itself may be busy or dead: that is for the streams' own deadlines to say.
        """
        found = []
        for number, link in self._links.items():
            if link.state != "up" or not link.owed:
                continue
            since = link.owing_since()
            allowed_s = self.limits.stuck_s + 4 * link.in_flight_bytes / link.pace()
            others = (one.proved_s for at, one in self._links.items() if at != number and one.state == "up")
            if now - since > allowed_s and max(others, default=float("-inf")) > since:
                found.append(number)
        return found

    def to_ask(self, now: float) -> list[int]:
        """Idle links to ask for a sign of life, because another owes for half of stuck_s."""
        half_s = self.limits.stuck_s / 2
        if not any(one.state == "up" and one.owed and now - one.owing_since() > half_s for one in self._links.values()):
            return []
        return [number for number, link in self._links.items() if link.state == "up" and not link.owed]

    def _move(self, link: int, event: str) -> None:
        one = self._links[link]
        try:
            state = LINK_TABLE[one.state, event]
        except KeyError:
            raise IllegalTransition(f"KV link {link}", one.state, event, one.history) from None
        one.history = (*one.history[-9:], f"{one.state} {event}")
        one.state = state


def _least(links: dict[int, _Link[Item]], num_bytes: int) -> int | None:
    """Least (in flight + num_bytes) / bandwidth; one that is not measured only if none is."""
    measured = {number: link for number, link in links.items() if link.bytes_per_s}
    among = measured or links
    return min(
        among,
        key=lambda at: ((among[at].in_flight_bytes + num_bytes) / (among[at].bytes_per_s or 1.0), at),
        default=None,
    )
