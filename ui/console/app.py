"""The script that Streamlit runs for each session at each interaction: language, live strip, the chosen page."""

from __future__ import annotations

import streamlit as st

from ui.console import screens
from ui.console.backend import serving
from ui.console.frame import REBALANCE_PAGE, Frame, choose_language, language
from ui.console.islands import strip


def main() -> None:
    st.set_page_config(page_title="Phaseplane", layout="wide")
    backend = serving()
    say = language()
    frame = Frame(backend, say, backend.stale)
    pages = {
        name: st.Page(screens.bound(draw, frame), title=say.say(f"console.nav.{name}"), url_path=name,
                      default=name == screens.FIRST)
        for name, draw in screens.PAGES.items()
    }  # fmt: skip
    chosen = st.navigation(list(pages.values()), expanded=True)
    choose_language(say)
    st.session_state[REBALANCE_PAGE] = pages["rebalance"]
    strip(say, frame.stale)
    chosen.run()


main()
