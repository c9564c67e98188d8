"""Orders to an instance may repeat, be late and overtake each other: at most one generation of a request is at work."""

from __future__ import annotations

from nodes.core.events import Gone
from nodes.core.legs import FENCE_S, MAX_FENCES, Legs
from transfer.wire.messages import Abort


class Leg:
    def __init__(self, said: list[str], generation: int, request_id: str = "r") -> None:
        self.said, self.request_id, self.generation, self.forgotten = said, request_id, generation, False

    def begin(self) -> None:
        self.said.append(f"begin {self.generation}")

    def repeated(self) -> None:
        self.said.append(f"again {self.generation}")

    def abort(self, reason: str) -> None:
        self.said.append(f"abort {self.generation}")


def end(legs: Legs[Leg], generation: int, now: float = 0.0, request_id: str = "r") -> int | None:
    """Everything that a shell does on a Gone; the generation of the Abort that it answers."""
    effect = Gone(request_id=request_id, generation=generation, num_blocks=1)
    answered = legs.answered(effect, legs.gone(effect, now))
    legs.begin_next(request_id)
    return answered


def test_a_newer_generation_waits_until_the_older_has_let_go() -> None:
    said: list[str] = []
    legs = Legs[Leg]()
    for generation in (1, 1, 3, 2):
        legs.admit(Leg(said, generation))
    assert said == ["begin 1", "again 1", "abort 1", "abort 1"]
    assert end(legs, 1) is None
    assert said[4:] == ["begin 3"]
    legs.admit(Leg(said, 1))
    legs.admit(Leg(said, 2))
    assert said[5:] == []
    assert (legs.find("r", 3) is legs.find("r"), legs.find("r", 2)) == (True, None)


def test_what_has_ended_does_not_begin_again_until_it_is_forgotten() -> None:
    said: list[str] = []
    legs = Legs[Leg]()
    legs.admit(Leg(said, 1))
    end(legs, 1, now=10.0)
    legs.admit(Leg(said, 1))
    assert (said, legs.fenced, legs.idle) == (["begin 1"], ["r"], True)
    legs.admit(Leg(said, 5, "other"))
    end(legs, 5, now=10.0 + FENCE_S + 1.0, request_id="other")
    assert legs.fenced == ["other"]
    for number in range(MAX_FENCES + 5):
        legs.abort(Abort(request_id=str(number), generation=1, reason=""), now=10.0 + FENCE_S + 2.0)
    assert len(legs.fenced) == MAX_FENCES


def test_an_abort_is_answered_once_by_the_end_of_what_it_meant() -> None:
    said: list[str] = []
    legs = Legs[Leg]()
    assert not legs.abort(Abort(request_id="r", generation=2, reason=""), now=0.0)
    assert (end(legs, 2), end(legs, 2), legs.num_unanswered) == (2, None, 0)
    legs.admit(Leg(said, 3))
    legs.admit(Leg(said, 4))
    assert legs.abort(Abort(request_id="r", generation=4, reason=""), now=0.0)
    assert (end(legs, 3), legs.idle) == (4, True)
    assert said == ["begin 3", "abort 3", "abort 3"]


def test_a_leg_of_a_control_plane_that_is_gone_gives_way_to_any_generation() -> None:
    said: list[str] = []
    legs = Legs[Leg](lambda: said.append("began"))
    legs.admit(Leg(said, 7))
    legs.forget_all("gone")
    legs.admit(Leg(said, 1))
    end(legs, 7)
    assert said == ["began", "begin 7", "abort 7", "abort 7", "began", "begin 1"]
    assert legs.fenced == []
