"""Overview: are objectives met, where is the bottleneck, what would help, what did the last change do."""

from __future__ import annotations

import streamlit as st

from ui.console.frame import Frame
from ui.console.islands import overview


def draw(frame: Frame) -> None:
    st.title(frame.say.say("console.nav.overview"))
    overview(frame.say, frame.stale)
