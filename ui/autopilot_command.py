"""The commands autopilot, pin and unpin: what the online planner does, may do, and must leave alone."""

from __future__ import annotations

from typing import Annotated

import typer

from transfer.autopilot import AutopilotMode, AutopilotRequest, PinRequest
from ui.ask import show
from ui.client import DEFAULT_URL
from ui.errors import UsageFault
from ui.options import ApiKey, Command, Config, Json, Url, span_s
from ui.render import show_autopilot, show_looks, show_pins

MODES: tuple[AutopilotMode, ...] = ("off", "advise", "auto")

Subject = Annotated[str, typer.Argument(metavar="SUBJECT", help="An instance, or split: the roles of all instances.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (autopilot, pin, unpin):
        app.command(cls=Command)(command)


def autopilot(
    mode: Annotated[str | None, typer.Argument(metavar="[off|advise|auto]", help="Nothing: only look.")] = None,
    floor: Annotated[int | None, typer.Option("--floor", min=1, help="Instances it leaves in every role.")] = None,
    max_moves: Annotated[
        int | None, typer.Option("--max-moves", min=0, help="Most switches of one move; 0: a third of the engines.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Show its reasons of so long: 90s, 30m, 24h, 2d.")
    ] = None,
    json: Json = False, url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None,
) -> None:  # fmt: skip
    """Show or set what changes roles by itself: off, advise (says what it would do) or auto (does it).

    In one sentence: every 1.5 s it asks which few role switches would win most goodput under the traffic of the last
    10, 60 and 300 s, and makes them when three times in a row one of these windows is surer of the gain than chance,
    the model's error, the switch itself and the return of the earlier load can cost and no shorter one speaks against
    it, after which it rests for 15 s.

    It never takes the last instance of a role and leaves alone what is pinned (phaseplane pin; an operator's rebalance
    pins the split for an hour). It holds while heartbeats are out, and says so.
    """
    if mode is not None and mode not in MODES:
        raise UsageFault(f"{mode!r} is no mode of the autopilot; choose off, advise or auto")
    if since is not None:
        if mode is not None or floor is not None or max_moves is not None:
            raise UsageFault("--since only shows; leave it out to change the autopilot")
        since_s = span_s(since)
        show(lambda client: client.looks(since_s), show_looks, url, api_key, json)
        return
    chosen = next((one for one in MODES if one == mode), None)
    change = AutopilotRequest(mode=chosen, floor=floor, max_moves=max_moves)
    looks = mode is None and floor is None and max_moves is None
    show(
        lambda client: client.autopilot() if looks else client.set_autopilot(change), show_autopilot, url, api_key, json
    )


def pin(
    subject: Subject = "split",
    ttl: Annotated[
        float | None, typer.Option("--ttl", min=1.0, help="Seconds until it ends by itself; by default it is kept.")
    ] = None,
    why: Annotated[str, typer.Option("--why", help="Shown with it.")] = "",
    json: Json = False, url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None,
) -> None:  # fmt: skip
    """Keep the autopilot from changing roles, of one instance or of all (split). Rebalancing by hand stays possible."""
    show(lambda client: client.pin(PinRequest(subject=subject, ttl_s=ttl, why=why)), show_pins, url, api_key, json)


def unpin(
    subject: Subject = "split",
    json: Json = False, url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None,
) -> None:  # fmt: skip
    """Let the autopilot change it again."""
    show(lambda client: client.unpin(subject), show_pins, url, api_key, json)
