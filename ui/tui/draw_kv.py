"""Draws the KV panel: hit rates by tier, links from prefill to decode, pools, popular prefixes, failures."""

from __future__ import annotations

from transfer.screens import CacheView, KvDetail, LinkView
from ui.figures import count, num_bytes, share, short_count, span
from ui.insight import links
from ui.tui.charts import bar
from ui.tui.grid import Grid, Head, Row, drawn, figure, text
from ui.tui.lines import BLANK, Line, Span, Tone, beside, cells, line, pad, spaced, wrap
from ui.tui.model import Picture
from ui.tui.pen import Pen

TIERS = (("device", "device_tokens"), ("pool_dram", "pool_dram_tokens"), ("pool_ssd", "pool_ssd_tokens"))
BAR = 24
NAME = 14
LINK = 9
MANY = 12
"""Instances on one side of the matrix; beyond that the busiest links are listed instead."""
MAX_LISTED = 12
BUSY = 0.8
WIDE = 130


def kv_lines(pen: Pen, picture: Picture, width: int) -> list[Line]:
    """As many lines as there is to say."""
    detail = picture.kv
    if detail is None:
        return [line(pen.say("tui.kv.none"), "dim")]
    left = [*_hits(pen, detail, width), BLANK, *_failures(pen, detail, width)]
    caches = [BLANK, *_caches(pen, detail, width)]
    if width >= WIDE:
        half = (width - 3) // 2
        left = [*_hits(pen, detail, half), BLANK, *_failures(pen, detail, half), BLANK, *_prefixes(pen, detail, half)]
        right = [*_links(pen, detail, half), *[BLANK, *_caches(pen, detail, half)]]
        return beside([left, right], [half, half], gap=3)
    return [*left, BLANK, *_links(pen, detail, width), *caches, BLANK, *_prefixes(pen, detail, width)]


def _hits(pen: Pen, detail: KvDetail, width: int) -> list[Line]:
    hits = detail.hits
    lines: list[Line] = [pen.rule(pen.say("tui.kv.hits", tokens=short_count(hits.looked_up_tokens)), width)]
    for name, field in TIERS:
        tokens = getattr(hits, field)
        part = tokens / hits.looked_up_tokens if hits.looked_up_tokens else None
        value = (Span(pad(share(part), 8, right=True), "bold"), Span(f"  {short_count(tokens)}", "dim"))
        lines.append((Span(pad(pen.say(f"term.{name}"), NAME)), *bar(part or 0.0, BAR, "kv_pool", pen.ascii), *value))
    fetched = hits.pool_dram_tokens + hits.pool_ssd_tokens
    useful = share(hits.useful_tokens / fetched) if fetched else share(None)
    said = pen.say("tui.kv.useful", useful=useful, copies=count(hits.replicated_blocks))
    return [*lines, *(line(one, "dim") for one in wrap(said, width))]


def _failures(pen: Pen, detail: KvDetail, width: int) -> list[Line]:
    """What went wrong since the start, and blocks held for nobody."""
    parts: list[Line] = [
        (Span(pen.name("tui.kv.failure", name)), Span(f" {count(num)}", "warn" if num else "dim"))
        for name, num in detail.failures.items()
    ]
    tone: Tone = "bad" if detail.orphaned_kv_blocks else "dim"
    parts.append((Span(pen.say("tui.kv.orphaned")), Span(f" {count(detail.orphaned_kv_blocks)}", tone)))
    lines: list[Line] = [pen.rule(pen.say("tui.kv.failures"), width)]
    row: list[Line] = []
    for part in parts:
        if row and cells(spaced([*row, part])) > width:
            lines.append(spaced(row))
            row = []
        row.append(part)
    return [*lines, spaced(row)]


def _links(pen: Pen, detail: KvDetail, width: int) -> list[Line]:
    """Utilisation of every prefill to decode link; what does not fit is a list of the busiest."""
    prefills, decodes, by_pair = links(detail)
    lines: list[Line] = [pen.rule(pen.say("tui.kv.links", bytes=num_bytes(detail.handoff_bytes)), width)]
    if not by_pair:
        return [*lines, line(pen.say("tui.kv.no_links"), "dim")]
    corner = pen.say("tui.kv.from_to")
    name = max(len(one) for one in [*prefills, corner]) + 1
    if len(prefills) > MANY or len(decodes) > MANY or name + len(decodes) * (LINK + 1) > width:
        return lines + _busiest(pen, detail, width)
    title = [Span(pad(corner, name), "dim")]
    title += [Span(f" {pad(_tail(one), LINK, right=True)}", "decode") for one in decodes]
    lines.append(tuple(title))
    for prefill in prefills:
        spans = [Span(pad(prefill, name), "prefill")]
        for decode in decodes:
            link = by_pair.get((prefill, decode))
            value = "-" if link is None else f"{link.utilisation:.0%}"
            spans.append(Span(f" {pad(value, LINK, right=True)}", _link_tone(link)))
        lines.append(tuple(spans))
    return lines


def _busiest(pen: Pen, detail: KvDetail, width: int) -> list[Line]:
    chosen = sorted(detail.links, key=lambda link: (-link.utilisation, -link.num_bytes))[:MAX_LISTED]
    rows = []
    for link in chosen:
        overlap = 1 - link.exposed_s / link.busy_s if link.busy_s > 0 else None
        rows.append(Row(f"{link.prefill} {link.decode}", (
            text(f"{link.prefill} {pen.arrow()} {link.decode}"),
            figure(f"{link.utilisation:.0%}", link.utilisation, _link_tone(link)),
            figure(pen.say("tui.per_s", value=num_bytes(link.bytes_per_s)), link.bytes_per_s),
            figure(share(overlap), overlap), figure(count(link.num_transfers), link.num_transfers),
        )))  # fmt: skip
    heads = (
        Head(pen.say("tui.kv.link")), Head(pen.say("tui.kv.utilisation"), True), Head(pen.say("tui.kv.rate"), True, 1),
        Head(pen.say("tui.kv.overlap"), True, 2), Head(pen.say("tui.kv.transfers"), True, 3),
    )  # fmt: skip
    found = drawn(Grid(heads, tuple(rows)), width, len(rows) + 1, ascii=pen.ascii)
    if len(detail.links) > len(chosen):
        found.append(line(pen.say("tui.kv.more_links", num=len(detail.links) - len(chosen)), "dim"))
    return found


def _caches(pen: Pen, detail: KvDetail, width: int) -> list[Line]:
    """Pools first, then engines by how full they are."""
    ordered = sorted(detail.caches, key=lambda one: (one.role != "kv_pool", -_use(one), one.id))
    rows = []
    for one in ordered:
        role = pen.role(one.role)
        ssd = pen.say("tui.instance.of", used=count(one.ssd_blocks), all=count(one.ssd_capacity_blocks))
        gauge = "".join(span.text for span in bar(_use(one), 8, "", pen.ascii))
        rows.append(Row(one.id, (
            text(one.id), text(role.text, role.tone), figure(f"{gauge} {_use(one):>4.0%}", _use(one)),
            figure(count(one.cached_blocks), one.cached_blocks), figure(count(one.free_blocks), one.free_blocks),
            figure(count(one.num_evicted), one.num_evicted), figure(count(one.num_preemptions), one.num_preemptions),
            text(ssd if one.ssd_capacity_blocks else "-", "dim"),
        )))  # fmt: skip
    heads = (
        Head(pen.say("term.instance"), most=24), Head(pen.say("term.role")), Head(pen.say("tui.kv.fill"), True),
        Head(pen.say("tui.kv.cached"), True), Head(pen.say("tui.kv.free"), True, 3),
        Head(pen.say("tui.kv.evicted"), True, 1), Head(pen.say("tui.instance.preemptions"), True, 2),
        Head(pen.say("tui.instance.ssd"), False, 4, 20),
    )  # fmt: skip
    title = pen.rule(pen.say("tui.kv.caches"), width)
    return [title, *drawn(Grid(heads, tuple(rows)), width, len(rows) + 1, ascii=pen.ascii)]


def _prefixes(pen: Pen, detail: KvDetail, width: int) -> list[Line]:
    title = pen.rule(pen.say("tui.kv.prefixes"), width)
    if not detail.prefixes:
        return [title, line(pen.say("tui.kv.no_prefixes"), "dim")]
    rows = [
        Row(one.name, (
            text(one.name), figure(count(one.num_hits), one.num_hits), figure(count(one.num_tokens), one.num_tokens),
            figure(span(one.last_hit_s), one.last_hit_s), text(", ".join(one.holders)),
        ))
        for one in detail.prefixes[:MAX_LISTED]
    ]  # fmt: skip
    heads = (
        Head(pen.say("tui.kv.prefix"), most=20), Head(pen.say("tui.kv.num_hits"), True),
        Head(pen.say("tui.kv.tokens"), True), Head(pen.say("tui.kv.last_hit"), True, 1),
        Head(pen.say("tui.kv.holders"), most=60),
    )  # fmt: skip
    return [title, *drawn(Grid(heads, tuple(rows)), width, len(rows) + 1, ascii=pen.ascii)]


def _use(one: CacheView) -> float:
    return one.used_blocks / one.num_blocks if one.num_blocks else 0.0


def _link_tone(link: LinkView | None) -> Tone:
    if link is None:
        return "dim"
    return "warn" if link.utilisation >= BUSY else ""


def _tail(name: str) -> str:
    """The end of an id, which tells instances apart."""
    return name if len(name) <= LINK else name[-LINK:]
