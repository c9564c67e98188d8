"""The live parts of the screen as markup: verdict, figures, instances, chart, stages, classes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from markupsafe import Markup

from transfer.api import AuditRow, ClassView, FleetState, InstanceView, ModelView
from transfer.terms import Slo
from ui import figures, looks
from ui.console import charts
from ui.console.broadcast import Drawn, Scene
from ui.console.markup import Column, folded, join, table, tag
from ui.console.trail import SPAN_S
from ui.insight import Trouble, VerdictKind, over_text, stage_shares, verdict, with_changes
from ui.words import Words, words

ACTS = ("apply", "undo", "failed", "cordon", "drain", "resume", "autopilot", "pin", "unpin", "objectives")
"""Actions of the audit log that are marked in charts."""
TARGET = 0.9
"""Attainment from which objectives are said to be met."""


def draw(scene: Scene, lang: str) -> Drawn:
    """Every live part in one language."""
    say = words(lang)
    state = scene.state
    if state is None:
        text = say.say("app.connecting", url=scene.url)
        return Drawn("connecting", "", {"verdict": str(_sentence("stale", text))})
    kind, text = verdict_text(scene, say)
    parts = {
        "verdict": _sentence(kind, text), "figures": _figures(state, say), "spark": _spark(scene, say),
        "tiles": tiles(state.instances, say), "advice": _advice(state, say), "chart": _chart(scene, say),
        "stages": stages(state, say), "classes": classes(state.classes, say),
    }  # fmt: skip
    return Drawn(kind, text, {name: str(part) for name, part in parts.items()}, _fleet_mark(state))


def verdict_text(scene: Scene, say: Words) -> tuple[VerdictKind, str]:
    """Its kind, and one sentence: what is broken, else whether objectives are met."""
    fleet = scene.state
    if fleet is None:
        return "stale", say.say("app.never")
    found = verdict(fleet, TARGET)
    if found.kind == "degraded":
        trouble = say.say("console.list_join").join(_trouble(one, say) for one in found.troubles)
        text = say.say("verdict.degraded", trouble=trouble)
    elif found.kind == "idle":
        text = say.say("verdict.idle", window=figures.span(fleet.goodput.window_s))
    else:
        attainment, target = figures.share(found.attainment), figures.share(TARGET)
        text = say.say(f"verdict.{found.kind}", attainment=attainment, target=target)
    return found.kind, with_changes(text, fleet, say)


def role_badge(role: str, say: Words) -> Markup:
    """Letter and colour, with the role's name for those who hover or listen."""
    name = role_name(role, say)
    return tag("span", looks.role(role).sign, class_=f"pp-role pp-role-{role}", title=name, aria_label=name)


def role_name(role: str, say: Words) -> str:
    return say.say(f"role.{role}") if say.has(f"role.{role}") else role


def state_name(state: str, say: Words) -> str:
    return say.say(f"state.{state}") if say.has(f"state.{state}") else state


def stage_name(stage: str, say: Words) -> str:
    return say.say(f"stage.{stage}") if say.has(f"stage.{stage}") else stage


def tiles(instances: tuple[InstanceView, ...], say: Words) -> Markup:
    """One tile an instance: letter of its role, sign of its state, how full its KV is."""
    return join(_tile(view, say) for view in instances)


def stages(state: FleetState, say: Words) -> Markup:
    """Where requests that miss lose their time: a bar, and the same as a table."""
    shares = stage_shares(state.stages_s)
    title = say.say("console.overview.stages_title", window=figures.span(state.goodput.window_s))
    heading = tag("h3", title)
    if not shares:
        return join([heading, tag("p", say.say("console.overview.no_misses"), class_="pp-quiet")])
    parts = [
        charts.Part(f"stage-{name}", looks.stage(name).sign, spent,
                    f"{stage_name(name, say)} {figures.seconds(spent)}, {figures.share(share)}")
        for name, spent, share in shares
    ]  # fmt: skip
    keys = charts.legend(
        [(f"stage-{n}", f"{looks.stage(n).sign.upper()} {stage_name(n, say)} {figures.share(s)}") for n, _, s in shares]
    )
    columns = [Column(say.say("console.stage")), Column(say.say("term.time"), True), Column("%", True)]
    rows = [(stage_name(n, say), figures.seconds(spent), figures.share(s)) for n, spent, s in shares]
    data = folded(say.say("console.as_table"), table(columns, rows, title))
    over = over_text(state, say)
    return join([heading, tag("p", over) if over else None, charts.bar(parts, title), keys, data])


def classes(views: tuple[ClassView, ...], say: Words) -> Markup:
    """Traffic classes: objectives, attainment, percentiles of the window."""
    columns = [
        Column(say.say("term.class")), Column(say.say("term.objectives")),
        *(Column(title, True) for title in (
            say.say("term.attainment"), say.say("term.goodput"), "TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90",
            say.say("term.doomed"))),
    ]  # fmt: skip
    rows = [
        (
            one.name, objectives(one.slo, say),
            figures.share(one.recent_good / one.recent_total if one.slo and one.recent_total else None),
            figures.per_s(one.recent_per_s) if one.slo else figures.NONE, figures.seconds(one.ttft_s.p50),
            figures.seconds(one.ttft_s.p90), figures.seconds(one.tpot_s.p50), figures.seconds(one.tpot_s.p90),
            figures.count(one.doomed),
        )
        for one in views
    ]  # fmt: skip
    return table(columns, rows, say.say("console.overview.classes_title"))


def models(views: tuple[ModelView, ...], say: Words) -> Markup:
    """Which of several models misses, over all classes, in the window."""
    columns = [
        Column(say.say("term.model")), Column(say.say("term.attainment"), True), Column(say.say("term.goodput"), True),
        *(Column(title, True) for title in ("TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90")),
    ]  # fmt: skip
    rows = [
        (
            one.name, figures.share(one.recent_good / one.recent_total if one.recent_total else None),
            figures.per_s(one.recent_per_s), figures.seconds(one.ttft_s.p50), figures.seconds(one.ttft_s.p90),
            figures.seconds(one.tpot_s.p50), figures.seconds(one.tpot_s.p90),
        )
        for one in views
    ]  # fmt: skip
    return table(columns, rows, say.say("console.traffic.models"))


def objectives(slo: Slo | None, say: Words) -> str:
    if slo is None:
        return say.say("console.no_objectives")
    text = f"TTFT {figures.seconds(slo.ttft_s)}, TPOT {figures.seconds(slo.tpot_s)}"
    return text if slo.e2e_s is None else f"{text}, E2E {figures.seconds(slo.e2e_s)}"


def marks_of(rows: Iterable[AuditRow]) -> list[charts.Mark]:
    """What somebody did to the fleet, for a chart; what was only advised or scored is left out."""
    return [charts.Mark(row.at_s, f"{row.actor}: {row.action} {row.subject}") for row in rows if row.action in ACTS]


def ago(now_s: float, say: Words) -> charts.Say:
    """Labels of a time axis that ends now."""

    def label(at: float) -> str:
        back = now_s - at
        return say.say("console.now") if back < 1 else f"\u2212{figures.span(back)}"

    return label


def _fleet_mark(state: FleetState) -> str:
    """Short, and another one whenever what may be done with the fleet has changed."""
    roles = ";".join(f"{view.id} {view.role} {view.state}" for view in state.instances)
    return f"{state.version}-{crc32(roles.encode()):08x}"


def _sentence(kind: str, text: str) -> Markup:
    sign = looks.VERDICTS[kind].sign
    return join([tag("b", sign, class_=f"pp-sign pp-verdict-{kind}", aria_hidden="true"), tag("span", text)])


def _trouble(trouble: Trouble, say: Words) -> str:
    names = ", ".join(trouble.ids[:3]) + ("\u2026" if len(trouble.ids) > 3 else "")
    return say.say(f"fleet.trouble.{trouble.key}", ids=names, num=figures.count(trouble.number))


def _figures(state: FleetState, say: Words) -> Markup:
    goodput = state.goodput
    shown = (
        ("xpyd", "XPYD", state.xpyd), ("goodput", say.say("term.goodput"), figures.per_s(goodput.per_s)),
        ("attainment", say.say("term.attainment"), figures.share(state.recent_attainment)),
        ("per_gpu", say.say("term.per_gpu"), figures.per_gpu(goodput.per_gpu)),
        ("cost", say.say("term.cost"), figures.money(goodput.cost_per_good)),
        ("in_flight", say.say("term.in_flight"), figures.count(state.in_flight)),
        ("queue", say.say("term.queue"), figures.count(state.queue_depth)),
        *([("late", say.say("term.queue_late"), figures.count(state.queue_late))] if state.queue_late else ()),
    )  # fmt: skip
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", text), data_figure=key) for key, name, text in shown))


def _spark(scene: Scene, say: Words) -> Markup:
    values = [point.goodput_10s for point in list(scene.trail.points)[-180:]]
    return charts.sparkline(values, say.say("console.spark"))


def _tile(view: InstanceView, say: Words) -> Markup:
    role, state = role_name(view.role, say), state_name(view.state, say)
    text = say.say(
        "console.tile", id=view.id, role=role, state=state, hardware=view.hardware, running=view.num_running,
        waiting=view.num_waiting, kv=figures.share(view.kv_use),
    )  # fmt: skip
    fill = tag("i", style=f"height:{100 * min(1.0, max(0.0, view.kv_use)):.0f}%")
    sign = "" if view.state == "ready" else looks.state(view.state).sign
    letter = tag("span", looks.role(view.role).sign)
    return tag("span", fill, letter, tag("small", sign), class_=f"pp-tile pp-role-{view.role} pp-state-{view.state}",
               title=text)  # fmt: skip


def _advice(state: FleetState, say: Words) -> Markup:
    mode = say.say(f"autopilot.{state.autopilot}")
    line = say.sentence(state.advice_said, state.advice) or say.say(
        "advice.off" if state.autopilot == "off" else "advice.none"
    )
    notice = say.sentence(state.notice_said, state.notice)
    advice = [tag("b", say.say("console.overview.advice", mode=mode)), tag("span", line)]
    return join([*advice, tag("span", notice, class_="pp-notice") if notice else None])


def _chart(scene: Scene, say: Words) -> Markup:
    points, end = list(scene.trail.points), scene.trail.end_s
    start = end - SPAN_S
    title = say.say("console.overview.chart_title")
    drawn = charts.lines(
        [
            charts.Line(say.say("term.throughput"), "throughput", [(p.at_s, p.throughput) for p in points]),
            charts.Line(say.say("term.goodput"), "goodput", [(p.at_s, p.goodput) for p in points], fill=True),
        ],
        start, end, title=title, value=_rate, time=ago(end, say), marks=marks_of(scene.audit),
    )  # fmt: skip
    attained = charts.lines(
        [charts.Line(say.say("term.attainment"), "attainment", [(p.at_s, p.attainment) for p in points])],
        start, end, title=say.say("term.attainment"), value=_percent, time=ago(end, say), height=110, top=1.0,
        level=(TARGET, say.say("console.target", target=figures.share(TARGET))),
    )  # fmt: skip
    return join([tag("h3", title), drawn, attained, _minutes(scene, say)])


def _minutes(scene: Scene, say: Words) -> Markup:
    """The chart's values, one row a minute."""
    rows: list[tuple[str, ...]] = []
    end = scene.trail.end_s
    for point in reversed(scene.trail.points):
        if (end - point.at_s) >= 60 * len(rows):
            row = (figures.span(end - point.at_s), figures.per_s(point.goodput), figures.per_s(point.throughput))
            rows.append((*row, figures.share(point.attainment)))
    columns = [
        Column(say.say("console.ago")), Column(say.say("term.goodput"), True),
        Column(say.say("term.throughput"), True), Column(say.say("term.attainment"), True),
    ]  # fmt: skip
    return folded(say.say("console.as_table"), table(columns, rows))


def _rate(value: float) -> str:
    return f"{value:g}"


def _percent(value: float) -> str:
    return f"{value:.0%}"
