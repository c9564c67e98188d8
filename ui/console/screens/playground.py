"""Playground: a streamed chat that shows its own TTFT, TPOT, stages and route."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Awaitable, Callable

import streamlit as st

from transfer.api import RequestRecord
from ui import figures
from ui.chat import Conversation, Turn
from ui.client import FleetClient
from ui.console.frame import Frame, show
from ui.console.screens.requests import waterfall
from ui.errors import CliError
from ui.insight import refusal_text

TALK = "talk"
"""In the session: [(who, text, turn or None, record or None)]."""
LOOK_S = 0.05
RECORD_WAIT_S = 2.0
MAX_TURNS = 40

Said = tuple[str, str, Turn | None, RequestRecord | None]


def draw(frame: Frame) -> None:
    say = frame.say
    st.title(say.say("console.nav.playground"))
    models = [] if frame.state is None else list(frame.state.models)
    model_at, tokens_at, heat_at, clear_at = st.columns([3, 2, 2, 1], vertical_alignment="bottom")
    model = model_at.selectbox(say.say("console.playground.model"), models, key="talk model")
    most = tokens_at.number_input(say.say("console.playground.tokens"), 1, 4096, 128, key="talk tokens")
    heat = heat_at.number_input(say.say("console.playground.temperature"), 0.0, 2.0, 0.0, step=0.1, key="talk heat")
    if clear_at.button(say.say("console.playground.clear"), key="talk clear"):
        st.session_state[TALK] = []
    talk: list[Said] = st.session_state.setdefault(TALK, [])
    for said in talk:
        _show(frame, said)
    asked = st.chat_input(say.say("console.playground.ask"), disabled=frame.stale or model is None)
    if asked and model is not None:
        _ask(frame, talk, asked, model, int(most), float(heat))


def _ask(frame: Frame, talk: list[Said], asked: str, model: str, most: int, heat: float) -> None:
    history = [{"role": who, "content": text} for who, text, *_ in talk if text][-MAX_TURNS:]
    talk.append(("user", asked, None, None))
    _show(frame, talk[-1])
    pieces: queue.SimpleQueue[str] = queue.SimpleQueue()

    async def answer(client: FleetClient) -> Turn:
        conversation = Conversation(client, model, most, heat, messages=history)
        return await conversation.ask(asked, pieces.put)

    with st.chat_message("assistant"):
        turn = _stream(frame, answer, pieces)
    if turn is None:
        talk.pop()
        return
    talk.append(("assistant", turn.text, turn, _record(frame, turn.request_id)))
    st.rerun()


def _stream(
    frame: Frame, answer: Callable[[FleetClient], Awaitable[Turn]], pieces: queue.SimpleQueue[str]
) -> Turn | None:  # fmt: skip
    """Show the answer as it comes. Leaving the page ends it, on the fleet too."""
    place, text = st.empty(), ""
    future = frame.backend.spawn(answer)
    try:
        while not (future.done() and pieces.empty()):
            with contextlib.suppress(queue.Empty):
                text += pieces.get(timeout=LOOK_S)
            while not pieces.empty():
                text += pieces.get()
            place.text(text)
        return future.result()
    except CliError as error:
        st.error(refusal_text(error, frame.say))
        return None
    finally:
        future.cancel()


def _record(frame: Frame, request_id: str) -> RequestRecord | None:
    """How the fleet itself timed it; the history has it a moment after the end."""
    until = time.monotonic() + RECORD_WAIT_S
    while request_id and time.monotonic() < until:
        try:
            return frame.backend.ask(lambda client: client.request_record(request_id))
        except CliError:
            time.sleep(LOOK_S)
    return None


def _show(frame: Frame, said: Said) -> None:
    who, text, turn, record = said
    say = frame.say
    with st.chat_message(who):
        st.text(text)
        if turn is not None:
            st.caption(say.say("console.playground.figures", ttft=figures.seconds(turn.ttft_s),
                               tpot=figures.seconds(turn.tpot_s), tokens=turn.output_tokens))  # fmt: skip
        if record is not None:
            st.caption(say.say("console.requests.places", prefill=record.prefill or record.decode,
                               decode=record.decode, resumes=record.num_resumes,
                               migrations=record.num_migrations))  # fmt: skip
            show(waterfall(record, say))
