"""The TokenRouter: order, fencing, resume, deadlines, bounds, and exactly one Ended for every request."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from gateway_fakes import items

from controlplane.core.events import Ended, Event, Expect, Fail, FirstToken, RequestSpec
from controlplane.gateway import streams
from controlplane.gateway.assembler import Assembler
from controlplane.gateway.errors import ApiError
from controlplane.gateway.streams import Client, Stream, TokenRouter
from controlplane.gateway.tokenizer import ByteTokenizer
from transfer.errors import Overloaded
from transfer.said import say
from transfer.terms import FinishReason, SamplingParams, pack_tokens, unpack_tokens
from transfer.wire.messages import PrefillDone, StepOutput, TokenItem

GONE = say("ended.disconnected")


class Bench:
    """A router with a clock in the test's hands."""

    def __init__(self, max_streams: int = 8, max_unread_tokens: int = 50) -> None:
        self.now = 100.0
        self.events: list[Event] = []
        self.gaps: list[float] = []
        self.router = TokenRouter(
            self.events.append, lambda: self.now, max_streams=max_streams, max_unread_tokens=max_unread_tokens,
            on_gap=self.gaps.append,
        )  # fmt: skip
        self.num_drops = 0

    def drop(self) -> None:
        self.num_drops += 1

    def open(
        self, request_id: str = "r", *, live: bool = True, stops: tuple[str, ...] = (), num_prompt: int = 3
    ) -> Stream:
        prompt = pack_tokens(list(range(1, num_prompt + 1)))
        spec = RequestSpec(
            request_id=request_id, model="m", tokens=prompt, sampling=SamplingParams(max_tokens=64),
            traffic_class="default", arrived_s=self.now, arrived_at=0.0, timeout_s=30.0,
        )  # fmt: skip
        assembler = Assembler(ByteTokenizer(9).detokenizer(), stops)
        return self.router.open(spec, Client(self.drop), assembler, live)

    def expect(self, generation: int = 1, request_id: str = "r") -> None:
        self.router.expect(Expect(request_id=request_id, generation=generation))

    def step(self, *made: TokenItem) -> None:
        self.router.on_step(StepOutput(epoch=1, items=made))

    def read(self, stream: Stream) -> str:
        text = "".join(piece.text for piece in stream.take())
        self.router.delivered(stream)
        return text

    def ended(self) -> Ended:
        found = [event for event in self.events if isinstance(event, Ended)]
        assert len(found) == 1
        return found[0]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_tokens_reach_the_client_with_times_of_its_socket(bench: Bench) -> None:
    stream = bench.open()
    bench.expect()
    bench.now += 0.5
    bench.step(*items("r", "ab", finish=None))
    assert not bench.events
    bench.now += 0.1  # the write takes its time
    assert bench.read(stream) == "ab"
    assert bench.events == [FirstToken(request_id="r")]
    bench.now += 0.2
    bench.step(*items("r", "c", finish=None, start=2))
    bench.read(stream)
    bench.now += 0.4
    bench.step(*items("r", "d", start=3))
    bench.read(stream)
    ended = bench.ended()
    assert (ended.outcome, ended.finish_reason, ended.by_node, ended.output_tokens) == ("ok", "stop", True, 5)
    assert ended.ttft_s == pytest.approx(0.6)
    assert ended.tpot_s == pytest.approx(0.6 / 4)
    assert ended.max_itl_s == pytest.approx(0.4)
    assert ended.e2e_s == pytest.approx(1.2)
    assert bench.gaps == pytest.approx([0.2, 0.4])
    assert len(bench.router) == 0


def test_an_unstreamed_answer_is_timed_by_its_tokens_and_ends_with_the_last(bench: Bench) -> None:
    stream = bench.open(live=False)
    bench.expect()
    bench.now += 0.25
    bench.step(*items("r", "a", finish=None))
    assert bench.events == [FirstToken(request_id="r")]
    bench.now += 0.5
    bench.step(*items("r", "b", start=1, finish=FinishReason.LENGTH))
    ended = bench.ended()
    assert (ended.ttft_s, ended.tpot_s, ended.finish_reason) == (0.25, 0.5, "length")
    assert "".join(piece.text for piece in stream.take()) == "ab"


@pytest.mark.parametrize("live", [True, False])
def test_an_end_without_a_token_ends_it_once_all_before_it_is_here(bench: Bench, live: bool) -> None:
    """As an engine says that only learns afterwards that its last token was the last."""
    stream = bench.open(live=live)
    bench.expect()
    end = TokenItem(request_id="r", generation=1, index=2, token_ids=(), finish=FinishReason.LENGTH)
    bench.step(*items("r", "a", finish=None), end)
    assert stream.finish is None
    bench.step(*items("r", "b", finish=None, start=1))
    assert bench.read(stream) == "ab"
    ended = bench.ended()
    assert (ended.outcome, ended.finish_reason, ended.by_node, ended.output_tokens) == ("ok", "length", True, 2)


def test_one_token_has_no_tpot(bench: Bench) -> None:
    bench.open(live=False)
    bench.expect()
    bench.step(*items("r", "a", finish=FinishReason.LENGTH))
    assert (bench.ended().tpot_s, bench.ended().max_itl_s) == (None, None)


def test_repeated_and_overlapping_items_add_nothing(bench: Bench) -> None:
    stream = bench.open()
    bench.expect()
    first = items("r", "ab", finish=None)
    bench.step(*first)
    bench.step(*first)
    bench.step(*items("r", "bcd", finish=None, start=1))
    assert bench.read(stream) == "abcd"
    assert stream.output_ids == list(b"abcd")


def test_items_that_overtook_others_wait_for_them(bench: Bench) -> None:
    stream = bench.open()
    bench.expect(1)
    bench.expect(2)
    bench.step(*items("r", "c", finish=None, start=2, generation=2))
    bench.step(*items("r", "de", finish=None, start=3, generation=2))
    assert stream.take() == []
    bench.step(*items("r", "abc", finish=None, generation=1))
    assert bench.read(stream) == "abcde"
    assert stream.generations == (2,)
    bench.step(*items("r", "x", finish=None, start=5, generation=1))
    assert bench.read(stream) == ""
    assert bench.router.num_late_items == 1


def test_a_hole_that_stays_is_an_error(bench: Bench) -> None:
    stream = bench.open()
    bench.expect()
    bench.step(*items("r", "x", finish=None, start=3))
    bench.now += streams.GAP_PATIENCE_S - 0.1
    bench.router.sweep()
    assert not stream.ended
    bench.now += 0.2
    bench.router.sweep()
    assert stream.error is not None
    bench.router.delivered(stream)
    assert (bench.ended().outcome, bench.ended().by_node) == ("error", False)
    assert bench.ended().error_said == say("ended.part_lost")


def test_parked_items_are_bounded(bench: Bench) -> None:
    stream = bench.open()
    bench.expect()
    for place in range(streams.MAX_PARKED_ITEMS + 1):
        bench.step(*items("r", "x", finish=None, start=2 * place + 1))
    assert stream.error is not None
    bench.router.abandon(stream, GONE)


def test_nothing_is_accepted_before_expect_and_of_other_requests(bench: Bench) -> None:
    stream = bench.open()
    bench.step(*items("r", "a", finish=None))
    bench.step(*items("other", "a", finish=None))
    assert stream.take() == []
    assert bench.router.num_late_items == 2


def test_resume_tells_what_was_delivered_and_fences_the_old_generation(bench: Bench) -> None:
    stream = bench.open()
    bench.expect(1)
    bench.step(*items("r", "ab", finish=None))
    bench.step(*items("r", "x", finish=None, start=5))
    resume = bench.router.need_tokens("r")
    assert resume is not None
    assert (unpack_tokens(resume.tokens), resume.num_output) == ([1, 2, 3, *b"ab"], 2)
    bench.step(*items("r", "Z", finish=None, start=2, generation=1))
    bench.expect(2)
    bench.step(*items("r", "Z", finish=None, start=2, generation=1))
    bench.step(*items("r", "c", start=2, generation=2))
    assert bench.read(stream) == "abc"
    assert bench.ended().outcome == "ok"


def test_need_tokens_of_an_ended_request_is_not_answered(bench: Bench) -> None:
    stream = bench.open()
    bench.expect()
    bench.step(*items("r", "a"))
    assert bench.router.need_tokens("r") is None
    assert bench.router.need_tokens("nobody") is None
    bench.read(stream)


def test_a_stop_string_ends_the_request_here(bench: Bench) -> None:
    stream = bench.open(stops=("cd",))
    bench.expect()
    bench.step(*items("r", "abcde", finish=None))
    bench.step(*items("r", "f", finish=None, start=5))
    assert bench.read(stream) == "ab"
    ended = bench.ended()
    assert (ended.finish_reason, ended.output_tokens, ended.by_node) == ("stop", 4, False)


def test_a_stop_string_in_the_last_item_needs_no_abort(bench: Bench) -> None:
    stream = bench.open(stops=("cd",))
    bench.expect()
    bench.step(*items("r", "abcd", finish=FinishReason.LENGTH))
    assert bench.read(stream) == "ab"
    assert (bench.ended().finish_reason, bench.ended().by_node) == ("stop", True)


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [("overloaded", "rejected"), ("invalid", "rejected"), ("timeout", "timed_out"), ("unavailable", "error")],
)
def test_a_failure_from_the_scheduler(bench: Bench, kind: str, outcome: str) -> None:
    stream = bench.open()
    fail = Fail(request_id="r", status=429, kind=kind, said=say("text", text="no room"), retry_after_s=3.0)  # type: ignore[arg-type]
    bench.router.fail(fail)
    bench.router.fail(fail)
    assert stream.error is not None
    assert (stream.error.status, stream.error.retry_after_s) == (429, 3.0)
    bench.router.delivered(stream)
    assert (bench.ended().outcome, bench.ended().error) == (outcome, "no room")
    assert bench.ended().error_said == fail.said


def test_a_cancel_wins_over_nothing_but_an_earlier_error(bench: Bench) -> None:
    cancelled, failed, finished = bench.open("c"), bench.open("f"), bench.open("e")
    bench.expect(request_id="e")
    bench.step(*items("e", "a"))
    bench.router.fail_stream(failed, ApiError(500, "broken"), "error")
    for stream in (cancelled, failed, finished):
        bench.router.abandon(stream, GONE)
        bench.router.abandon(stream, GONE)
    found = {event.request_id: event for event in bench.events if isinstance(event, Ended)}
    assert {key: (event.outcome, event.by_node) for key, event in found.items()} == {
        "c": ("cancelled", False), "f": ("error", False), "e": ("cancelled", True),
    }  # fmt: skip
    assert sum(isinstance(event, Ended) for event in bench.events) == 3


def test_the_watchdog_ends_what_nobody_else_did(bench: Bench) -> None:
    stream = bench.open()
    bench.now += 30.0 + streams.WATCHDOG_GRACE_S - 0.1
    bench.router.sweep()
    assert not stream.ended
    bench.now += 0.2
    bench.router.sweep()
    bench.router.delivered(stream)
    assert bench.ended().outcome == "timed_out"
    assert stream.error is not None
    assert stream.error.status == 504
    assert stream.error.said == say("ended.unfinished", seconds=f"{stream.spec.timeout_s:g}")


def test_an_ended_stream_whose_client_takes_nothing_is_dropped(bench: Bench) -> None:
    bench.open()
    bench.expect()
    bench.step(*items("r", "a"))
    bench.now += streams.LINGER_S + 0.1
    bench.router.sweep()
    assert bench.num_drops == 1
    assert bench.ended().outcome == "cancelled"


def test_a_client_that_does_not_read_is_cancelled(bench: Bench) -> None:
    stream = bench.open()
    bench.expect()
    for place in range(50):
        bench.step(*items("r", "x", finish=None, start=place))
    assert not stream.closed
    bench.step(*items("r", "x", finish=None, start=50))
    assert (bench.num_drops, bench.ended().outcome, bench.ended().by_node) == (1, "cancelled", False)
    assert "does not read" in (bench.ended().error or "")
    assert bench.ended().error_said == say("ended.not_reading")


def test_an_unstreamed_answer_may_be_long(bench: Bench) -> None:
    bench.open(live=False)
    bench.expect()
    bench.step(*items("r", *("x" * 100), finish=FinishReason.LENGTH))
    assert (bench.ended().outcome, bench.ended().output_tokens) == ("ok", 100)


def test_streams_are_bounded(bench: Bench) -> None:
    for place in range(8):
        bench.open(str(place))
    bench.router.check_room(0)
    with pytest.raises(Overloaded, match="8 outputs"):
        bench.router.check_room(1)
    bench.router.fail_all(ApiError(503, "stopping"))
    for stream in list(bench.router._streams.values()):
        bench.router.delivered(stream)
    assert len(bench.router) == 0


def test_cached_tokens_come_from_prefill_or_from_a_local_decode(bench: Bench) -> None:
    remote, local = bench.open("remote", num_prompt=14), bench.open("local", num_prompt=14)
    bench.expect(request_id="remote")
    done = PrefillDone(
        request_id="remote", generation=1, computed_tokens=1, cached_tokens=4, fetched_tokens=8, prefill_s=0.0,
        transfer_s=0.0, exposed_s=0.0, transfer_bytes=0,
    )  # fmt: skip
    bench.router.on_prefill_done(done)
    bench.expect(request_id="local")
    bench.step(*items("local", "a", cached=5))
    bench.read(local)
    assert (remote.cached_tokens, local.cached_tokens, bench.ended().cached_tokens) == (12, 5, 5)
    bench.router.abandon(remote, GONE)


def test_a_resumed_request_keeps_the_cached_tokens_of_its_first_placement(bench: Bench) -> None:
    """The second instance finds the prompt's KV because the first one computed it: nothing was saved."""
    stream = bench.open(num_prompt=8)
    bench.expect()
    bench.step(*items("r", "ab", finish=None, cached=4))
    bench.router.need_tokens("r")
    bench.expect(2)
    bench.step(*items("r", "c", start=2, generation=2, cached=8))
    bench.read(stream)
    assert (stream.cached_tokens, bench.ended().cached_tokens) == (4, 4)


def test_the_prompts_last_token_never_counts_as_cached(bench: Bench) -> None:
    stream = bench.open(num_prompt=8)
    bench.expect(2)
    done = PrefillDone(
        request_id="r", generation=2, computed_tokens=0, cached_tokens=12, fetched_tokens=0, prefill_s=0.0,
        transfer_s=0.0, exposed_s=0.0, transfer_bytes=0,
    )  # fmt: skip
    bench.router.on_prefill_done(msgspec.structs.replace(done, generation=1, cached_tokens=3))  # of a fenced placement
    bench.router.on_prefill_done(done)
    assert stream.cached_tokens == 7


async def test_wake_ups_are_not_lost() -> None:
    client = Client()
    client.wake()
    client.wake()
    await asyncio.wait_for(client.wait(), 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.wait(), 0.01)
