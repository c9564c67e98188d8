"""Draws what stands on every panel: the top lines (verdict, goodput, advice) and the line of keys at the bottom."""

from __future__ import annotations

from transfer.api import FleetState
from ui import looks
from ui.feed import STALE_S
from ui.figures import money, per_gpu, per_s, share, span
from ui.insight import Trouble, Verdict, with_changes
from ui.tui.lines import BLANK, Line, Span, Tone, cells, fit, line, spaced, wrap
from ui.tui.model import Picture, cost_per_hour
from ui.tui.pen import VERDICT_TONES, Pen

PANELS = ("overview", "instances", "requests", "kv", "events", "autopilot")
NUM_HEAD_LINES = 5
MAX_IDS = 3
KEYS = ("?", "/", "s", "m", "d", "p", "u", "a", "space", "q")
"""Named at the bottom, as far as there is room; `?` shows all of them."""


def head(pen: Pen, picture: Picture, width: int) -> list[Line]:
    """NUM_HEAD_LINES lines: where and when, the verdict, goodput, what helps, a rule."""
    fleet = picture.fleet
    lines = [fit(_title(pen, picture), width)]
    if fleet is None:
        said = picture.error or pen.say("app.connecting", url=picture.url)
        texts = wrap(said, width, NUM_HEAD_LINES - 2)
        lines += [line(text, "warn") for text in texts]
        lines += [BLANK] * (NUM_HEAD_LINES - 1 - len(lines))
    else:
        lines += [fit(verdict_line(pen, picture), width), fit(goodput_line(pen, picture), width)]
        lines.append(fit(advice_line(pen, picture), width))
    mark = "-" if pen.ascii else "─"
    return [*lines, line(mark * width, "dim")]


def verdict_line(pen: Pen, picture: Picture) -> Line:
    found = picture.verdict
    tone: Tone = VERDICT_TONES[found.kind]
    sign = pen.sign(looks.VERDICTS[found.kind])
    return (Span(f"{sign} {verdict_sentence(pen, picture, found)}", tone),)


def verdict_sentence(pen: Pen, picture: Picture, found: Verdict) -> str:
    """Are objectives met, in a sentence."""
    if picture.fleet is None:
        return pen.say("app.never")
    if found.kind == "stale":
        return pen.say("app.stale", age=span(picture.age_s))
    return with_changes(_quality(pen, picture, picture.fleet, found), picture.fleet, pen.words)


def _quality(pen: Pen, picture: Picture, fleet: FleetState, found: Verdict) -> str:
    if found.kind == "idle":
        return pen.say("verdict.idle", window=span(fleet.goodput.window_s))
    if found.kind == "degraded":
        said = [trouble_text(pen, one) for one in found.troubles]
        if found.attainment is not None:
            said.append(pen.say("tui.head.met", attainment=share(found.attainment), target=_target(picture)))
        return pen.say("verdict.degraded", trouble=pen.say("tui.join").join(said))
    return pen.say(f"verdict.{found.kind}", attainment=share(found.attainment), target=_target(picture))


def trouble_text(pen: Pen, trouble: Trouble) -> str:
    ids = [pen.name("role", one) if trouble.key == "unserved" else one for one in trouble.ids]
    some = ", ".join(ids[:MAX_IDS])
    if len(ids) > MAX_IDS:
        some = pen.say("tui.and_more", some=some, num=len(ids) - MAX_IDS)
    return pen.say(f"fleet.trouble.{trouble.key}", ids=some, num=trouble.number)


def goodput_line(pen: Pen, picture: Picture) -> Line:
    """Goodput per second, GPU and good request in money, XPYD, what runs and waits."""
    fleet = picture.fleet
    if fleet is None:
        return BLANK
    goodput = fleet.goodput
    parts = [
        _figure(fleet.xpyd, "", "bold"),
        _figure(per_s(goodput.per_s), pen.say("term.goodput"), "goodput"),
        _figure(per_gpu(goodput.per_gpu), pen.say("term.per_gpu")),
    ]
    if cost_per_hour(fleet) > 0:
        parts.append(_figure(money(goodput.cost_per_good), pen.say("term.cost")))
    parts.append(_figure(str(fleet.in_flight), pen.say("term.in_flight")))
    if fleet.queue_depth:
        parts.append(_figure(str(fleet.queue_depth), pen.say("tui.head.queued"), "warn"))
    return spaced(parts)


def advice_line(pen: Pen, picture: Picture) -> Line:
    fleet = picture.fleet
    if fleet is None:
        return BLANK
    if fleet.autopilot == "off":
        return line(pen.say("advice.off"), "dim")
    mode = pen.name("autopilot", fleet.autopilot)
    said = pen.sentence(fleet.advice_said, fleet.advice) or pen.say("advice.none")
    return (Span(pen.say("tui.head.advice", mode=mode), "title"), Span(f" {said}"))


def footer(pen: Pen, panel: str, width: int) -> Line:
    """The panels by number, the present one marked, and the keys that fit."""
    found: Line = ()
    for number, name in enumerate(PANELS, 1):
        here = name == panel
        label = pen.say(f"tui.panel.{name}")
        tab = Span(f"[{number} {label}]" if here else f"{number} {label}", "bold" if here else "dim")
        found = (*found, Span(" "), tab) if found else (tab,)
    for key in KEYS:
        more: Line = (Span(f"  {key} ", "bold"), Span(pen.say(f"tui.key.{key_name(key)}"), "dim"))
        if cells(found) + cells(more) > width:
            break
        found = (*found, *more)
    return fit(found, width)


def key_name(key: str) -> str:
    """A key's name in the catalogue, where signs cannot be keys."""
    return _KEY_NAMES.get(key, key)


_KEY_NAMES = {
    "?": "help",
    "/": "filter",
    "[": "back",
    "]": "forward",
    "{": "far_back",
    "}": "far_forward",
    ":": "palette",
}


def _title(pen: Pen, picture: Picture) -> Line:
    fleet = picture.fleet
    models = ", ".join(fleet.models) if fleet is not None else picture.url
    parts: list[Line] = [line(pen.say("app.name"), "title"), line(models)]
    if fleet is not None:
        parts.append(_when(pen, picture))
        parts.append((Span(f"{pen.say('term.uptime')} {span(fleet.uptime_s)}", "dim"),))
    if picture.read_only:
        parts.append(line(pen.say("app.read_only"), "warn"))
    if picture.error and fleet is not None:
        parts.append(line(picture.error, "warn"))
    return spaced(parts)


def _when(pen: Pen, picture: Picture) -> Line:
    """What moment is shown, and whether it is now."""
    clock = pen.clock(picture.at_s)
    if picture.mode != "replay" and picture.age_s > STALE_S:
        return (Span(pen.say("tui.head.stale", clock=clock, age=span(picture.age_s)), "warn"),)
    if picture.mode == "live":
        return (Span(pen.say("tui.head.live", clock=clock), "good"),)
    ago = span(max(0.0, picture.newest_s - picture.at_s))
    return (Span(pen.say(f"tui.head.{picture.mode}", clock=clock, ago=ago), "warn"),)


def _target(picture: Picture) -> str:
    return f"{picture.target:.0%}"


def _figure(value: str, name: str, tone: Tone = "bold") -> Line:
    return (Span(value, tone), Span(f" {name}", "")) if name else (Span(value, tone),)
