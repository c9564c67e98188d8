"""KV: hit rate by tier, links from prefill to decode, hottest prefixes, fill, evictions, failures."""

from __future__ import annotations

import time

import streamlit as st
from markupsafe import Markup

from transfer.api import KvView
from transfer.screens import KvDetail, SeriesView
from ui import figures
from ui.console import charts
from ui.console.frame import Frame, show
from ui.console.islands import picture
from ui.console.markup import Column, folded, join, table, tag
from ui.console.views import ago, role_badge
from ui.insight import links
from ui.words import Words

HOUR_S = 3600
STEP_S = 10
TIERS = ("device", "pool_dram", "pool_ssd")
STYLES = dict(zip(TIERS, "abc", strict=True))


def draw(frame: Frame) -> None:
    say = frame.say
    st.title(say.say("console.nav.kv"))
    st.button(say.say("console.refresh"), key="kv again")
    detail = frame.ask(lambda client: client.kv())
    if detail is None:
        return
    past = frame.ask(lambda client: client.series([f"hit_{tier}" for tier in TIERS], since_s=-HOUR_S, step_s=STEP_S))
    show(tier_bar(detail.hits, say))
    if past is not None and past.series:
        picture(rate_chart(past, say), "hit_rates")
    left, right = st.columns(2)
    with left:
        show(link_matrix(detail, say))
    with right:
        show(prefix_table(detail, say))
    show(cache_table(detail, say))
    show(failure_table(detail, say))


def tier_bar(hits: KvView, say: Words) -> Markup:
    """Of the prompt tokens looked up, how many came from where."""
    title = say.say("console.kv.tiers")
    found = [(tier, getattr(hits, f"{tier}_tokens")) for tier in TIERS]
    computed = max(0, hits.looked_up_tokens - sum(tokens for _, tokens in found))
    names = [(STYLES[tier], say.say(f"term.{tier}"), tokens) for tier, tokens in found]
    names.append(("throughput", say.say("console.kv.computed"), computed))
    total = max(1, hits.looked_up_tokens)
    parts = [charts.Part(style, name[:1], tokens, f"{name} {figures.share(tokens / total)}")
             for style, name, tokens in names]  # fmt: skip
    keys = charts.legend([(style, f"{name} {figures.share(tokens / total)}") for style, name, tokens in names])
    columns = [Column(""), Column(say.say("console.kv.tokens"), True), Column("%", True)]
    rows = [(name, figures.count(tokens), figures.share(tokens / total)) for _, name, tokens in names]
    fetched = hits.pool_dram_tokens + hits.pool_ssd_tokens
    useful = say.say("console.kv.useful", share=figures.share(hits.useful_tokens / fetched)) if fetched else None
    return join([
        tag("h3", title, class_="pp-h3"), charts.bar(parts, title), keys,
        None if useful is None else tag("p", useful, class_="pp-quiet"),
        folded(say.say("console.as_table"), table(columns, rows, title)),
    ])  # fmt: skip


def rate_chart(past: SeriesView, say: Words) -> Markup:
    """Hit rate by tier over the last hour."""
    title, end = say.say("console.kv.rates"), time.time()
    if past.times:
        end = float(past.times[-1])
    series = {tier: past.series[f"hit_{tier}"].last for tier in TIERS if f"hit_{tier}" in past.series}
    drawn = [
        charts.Line(say.say(f"term.{tier}"), STYLES[tier], list(zip(map(float, past.times), values, strict=True)))
        for tier, values in series.items()
    ]
    chart = charts.lines(drawn, end - HOUR_S, end, title=title, value=lambda value: f"{value:.0%}",
                         time=ago(end, say), height=160, top=1.0)  # fmt: skip
    columns = [Column(say.say("console.ago")), *(Column(line.name, True) for line in drawn)]
    rows = [
        (figures.span(end - past.times[index]), *(figures.share(values[index]) for values in series.values()))
        for index in range(len(past.times) - 1, -1, -30)
    ]
    data = folded(say.say("console.as_table"), table(columns, rows, title))
    return join([tag("h3", title, class_="pp-h3"), chart, data])


def link_matrix(detail: KvDetail, say: Words) -> Markup:
    """Bytes a second from each prefill to each decode instance, and below it the counts."""
    rows, columns, by_pair = links(detail)
    title = say.say("console.kv.links")
    if not by_pair:
        return join([tag("h3", title, class_="pp-h3"), tag("p", say.say("console.nothing"), class_="pp-quiet")])
    most = max(1.0, *(link.num_bytes for link in by_pair.values()))

    def cell(row: str, column: str) -> tuple[float, str] | None:
        link = by_pair.get((row, column))
        return None if link is None else (0.7 * link.num_bytes / most, figures.num_bytes(link.num_bytes))

    head = [Column("P"), Column("D"), Column(say.say("console.kv.transfers"), True),
            Column(say.say("console.kv.bytes"), True), Column(say.say("console.kv.overlap"), True),
            Column(say.say("console.kv.utilisation"), True)]  # fmt: skip
    body = [
        (link.prefill, link.decode, figures.count(link.num_transfers), figures.num_bytes(link.num_bytes),
         figures.share(1 - link.exposed_s / link.busy_s if link.busy_s else None), figures.share(link.utilisation))
        for link in detail.links
    ]  # fmt: skip
    drawn = charts.matrix(rows, columns, cell, say.say("console.kv.corner"), title)
    return join([drawn, folded(say.say("console.kv.links_more"), table(head, body, title))])


def prefix_table(detail: KvDetail, say: Words) -> Markup:
    columns = [Column(say.say("console.kv.prefix")), Column(say.say("console.kv.tokens"), True),
               Column(say.say("console.kv.hits"), True), Column(say.say("console.kv.last"), True),
               Column(say.say("console.kv.holders"), wraps=True)]  # fmt: skip
    rows = [
        (one.name, figures.count(one.num_tokens), figures.count(one.num_hits), figures.span(one.last_hit_s),
         ", ".join(one.holders))
        for one in detail.prefixes
    ]  # fmt: skip
    return table(columns, rows, say.say("console.kv.prefixes"))


def cache_table(detail: KvDetail, say: Words) -> Markup:
    names = ("blocks", "used", "cached_blocks", "evicted", "preempted", "ssd")
    columns = [Column(say.say("term.instance")), Column(say.say("term.role")),
               *(Column(say.say(f"console.kv.{name}"), True) for name in names)]  # fmt: skip
    rows = [
        (one.id, role_badge(one.role, say), figures.count(one.num_blocks),
         figures.share(one.used_blocks / one.num_blocks if one.num_blocks else None), figures.count(one.cached_blocks),
         figures.count(one.num_evicted), figures.count(one.num_preemptions),
         figures.count(one.ssd_blocks) if one.ssd_capacity_blocks else figures.NONE)
        for one in detail.caches
    ]  # fmt: skip
    return table(columns, rows, say.say("console.kv.caches"))


def failure_table(detail: KvDetail, say: Words) -> Markup:
    rows = [
        (say.say(f"console.failure.{name}") if say.has(f"console.failure.{name}") else name, figures.count(count))
        for name, count in detail.failures.items()
    ]
    rows.append((say.say("console.kv.orphaned"), figures.count(detail.orphaned_kv_blocks)))
    return table([Column(""), Column("#", True)], rows, say.say("console.kv.failures"))
