"""What every page is handed: the fleet, the language, and the few ways in which pages ask, show and act."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import streamlit as st
from markupsafe import Markup

from transfer.api import FleetState
from ui import figures
from ui.client import FleetClient
from ui.console.backend import Backend
from ui.errors import CliError
from ui.feed import STALE_S
from ui.insight import refusal_text
from ui.words import DEFAULT, LANGUAGES, NAMES, Words, choose, words

T = TypeVar("T")
LANGUAGE = "lang"
REBALANCE_PAGE = "rebalance_page"
"""Keys of the session."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One run of the script. stale: the figures are too old to act on, so every action is disabled."""

    backend: Backend
    say: Words
    stale: bool

    @property
    def state(self) -> FleetState | None:
        return self.backend.state

    def ask(self, work: Callable[[FleetClient], Awaitable[T]], timeout_s: float = 30.0) -> T | None:
        """What the fleet answers; None after a message that says why there is no answer."""
        try:
            return self.backend.ask(work, timeout_s)
        except CliError as error:
            st.error(refusal_text(error, self.say))
            return None

    def act(self, work: Callable[[FleetClient], Awaitable[T]], timeout_s: float = 30.0) -> T | None:
        """Like `ask`, for what changes the fleet: refused while the figures are stale, whatever the browser sent."""
        if self.backend.stale:
            st.error(self.disabled_because)
            return None
        return self.ask(work, timeout_s)

    @property
    def disabled_because(self) -> str:
        return self.say.say("action.disabled_stale", age=figures.span(STALE_S))

    def button(
        self, label: str, key: str, *, primary: bool = False, disabled: bool = False, wide: bool = False
    ) -> bool:
        """A button for an action: disabled while the figures are stale, and saying so."""
        return st.button(
            label, key=key, type="primary" if primary else "secondary", disabled=self.stale or disabled,
            help=self.disabled_because if self.stale else None, width="stretch" if wide else "content",
        )  # fmt: skip


def show(markup: Markup) -> None:
    """Our own markup, everything in it escaped."""
    st.html(str(markup))


def language() -> Words:
    """The language of this session: chosen in the sidebar, at first the browser's."""
    if LANGUAGE not in st.session_state:
        asked = st.query_params.get(LANGUAGE) or st.context.locale
        st.session_state[LANGUAGE] = choose(asked, {}) if asked else DEFAULT
    return words(st.session_state[LANGUAGE])


def choose_language(say: Words) -> None:
    """The field for it, below the menu."""
    st.sidebar.selectbox(say.say("console.language"), LANGUAGES, key=LANGUAGE, format_func=NAMES.__getitem__)
