"""The page that Streamlit's script is loaded into, with our style sheet in it from the first paint on, so that what
comes later takes places that are kept free. It draws nothing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from streamlit.file_util import get_static_dir

from ui.console.markup import tag
from ui.console.style import style_sheet

HEAD_END = "</head>"


def page_routes(names: Iterable[str]) -> list[Route]:
    """The first page's address, and each page's own."""
    return [Route(path, _page) for path in ("/", *(f"/{name}" for name in names))]


@cache
def shell() -> str:
    """Streamlit's page with our styles at the end of its head. Raises ValueError when it has none."""
    before, found, after = (Path(get_static_dir()) / "index.html").read_text(encoding="utf-8").partition(HEAD_END)
    if not found:
        raise ValueError("this version of Streamlit serves another kind of page; install the version that is pinned")
    return f"{before}{tag('style', Markup(style_sheet()))}{found}{after}"


async def _page(_: Request) -> Response:
    return HTMLResponse(shell(), headers={"Cache-Control": "no-cache"})
