"""The islands of the page: the live strip on every page and Overview's charts, fed by GET /live of this server, and
pictures that stand still."""

from __future__ import annotations

from urllib.parse import urlencode

import msgspec
import streamlit as st
from markupsafe import Markup

from ui.console.markup import tag
from ui.console.style import read
from ui.words import Words

LIVE_PATH = "/live"

_strip = st.components.v2.component(
    "phaseplane_strip", html=read("strip.html"), js=read("island.js"), isolate_styles=False
)
_overview = st.components.v2.component(
    "phaseplane_overview", html=read("overview.html"), js=read("island.js"), isolate_styles=False
)

_picture = st.components.v2.component(
    "phaseplane_picture", html=str(tag("div", class_="pp-picture")), js=read("picture.js"), isolate_styles=False
)


def picture(markup: Markup, key: str) -> None:
    """Our own markup with SVG in it, everything in it escaped."""
    _picture(key=key, data=markup.encode())


def strip(say: Words, stale: bool) -> None:
    """Verdict, figures, sparkline, instances. The page runs again when the feed turns stale or recovers, and when
    instances, their roles or their states change."""
    _strip(key="strip", data=_data(say, stale), on_stale_change=_nothing, on_fleet_change=_nothing)


def overview(say: Words, stale: bool) -> None:
    """Advice, chart, stages and classes, live."""
    _overview(key="overview", data=_data(say, stale))


def _data(say: Words, stale: bool) -> bytes:
    """As bytes: anything else makes Streamlit load pandas, 110 MB, to see whether it is a data frame."""
    return msgspec.json.encode({
        "url": f"{LIVE_PATH}?{urlencode({'lang': say.lang})}", "was_stale": stale,
        "stale": say.under("app")["stale"], "never": say.say("app.never"),
    })  # fmt: skip


def _nothing() -> None:
    """That it is called is enough: the script runs again after it."""
