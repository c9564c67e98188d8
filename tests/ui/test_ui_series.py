"""`phaseplane series`: which series is meant, rows, extremes and means, gaps that are no zeros, and how it is drawn."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from ui_fakes import Fake

from transfer.screens import Column, SeriesView
from ui import series_names
from ui.errors import CliError
from ui.series import Gap, from_record, nice_every, recorded, report, step_for
from ui.series_command import zone_s
from ui.series_names import PULSE, chosen, figure, meaning
from ui.series_view import show_report

NAMES = (
    "attainment", "class.chat.goodput_per_s", "class.chat.ttft_p50_s", "class.default.goodput_per_s",
    "goodput_10s_per_s", "goodput_per_s", "in_flight", "instance.n.1.num_waiting", "instance.n.1.tpot_p50_s",
    "stage.prefill_s", "stage.queue_s",
)  # fmt: skip
T = 1_800_000_000


def utc(_: float) -> float:
    return 0.0


def a_view(step_s: int = 10) -> SeriesView:
    """Goodput of 0 is a value; from the fourth to the sixth step the control plane did not run."""
    goodput = (None, 2.0, 0.0, None, None, 4.0, 6.0)
    return SeriesView(
        step_s=step_s, times=tuple(T + step_s * index for index in range(7)),
        series={
            "goodput_per_s": Column(last=goodput, low=(None, 1.0, 0.0, None, None, 3.0, 5.0),
                                    high=(None, 3.0, 2.5, None, None, 4.5, 8.0)),
            "attainment": Column(last=(None, 1.0, None, None, None, 0.5, None)),
            PULSE: Column(last=(None, 0.0, 3.0, None, None, 1.0, 1.0)),
        },
    )  # fmt: skip


def test_a_name_may_leave_its_unit_out_and_a_star_ends_a_beginning() -> None:
    assert chosen(["goodput", "attainment"], "", NAMES) == ["goodput_per_s", "attainment"]
    assert chosen(["goodput_10s_per_s", "stage.*"], "", NAMES) == [
        "goodput_10s_per_s",
        "stage.prefill_s",
        "stage.queue_s",
    ]
    assert chosen(["ttft_p50"], "class.chat.", NAMES) == ["class.chat.ttft_p50_s"]
    assert chosen(["tpot_p50", "num_waiting"], "instance.n.1.", NAMES) == [
        "instance.n.1.tpot_p50_s", "instance.n.1.num_waiting",
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "lead", "said"), [
    ("godput", "", "there is no series 'godput'; did you mean goodput_per_s"),
    ("prefill", "", "did you mean stage.prefill_s?"),
    ("nothing_of_the_kind", "", "there is no series 'nothing_of_the_kind'; `phaseplane series` lists them"),
    ("goodput", "class.chap.", "no traffic class 'chap' has left a record; there are chat, default"),
    ("tpot_p50", "instance.n2.", "no instance 'n2' has left a record; there are n.1"),
    ("seed", "instance.n.1.", "there is no series 'seed'"),
])  # fmt: skip
def test_what_there_is_not_is_a_sentence_that_names_what_is_near(name: str, lead: str, said: str) -> None:
    with pytest.raises(CliError, match=re.escape(said)):
        chosen([name], lead, NAMES)


def test_what_is_known_and_has_no_value_yet_is_meant_too() -> None:
    assert chosen(["cost_per_good", "ttft_p90"], "", NAMES) == ["cost_per_good", "ttft_p90_s"], (
        "before any good request"
    )
    assert chosen(["attainment"], "class.chat.", NAMES) == ["class.chat.attainment"]
    assert chosen(["goodput"], "", ()) == ["goodput_per_s"]
    with pytest.raises(CliError, match="there is no series 'num_waiting'"):
        chosen(["num_waiting"], "class.chat.", NAMES)


def test_what_a_series_is_is_said_of_each_by_itself() -> None:
    for known in series_names.KNOWN.values():
        assert not [text for text in known.values() if "the same" in text or text.startswith("its ")]


def test_rows_have_extremes_and_means_and_a_gap_is_no_zero() -> None:
    found = report(a_view(), ["goodput_per_s", "attainment"], 70.0, 30.0, utc)
    assert (found.since_s, found.from_s, found.until_s, found.every_s) == (T, T + 10, T + 70, 30.0)
    assert found.down == (Gap(T + 30, T + 50),)
    goodput = found.series["goodput_per_s"]
    assert (goodput.last, goodput.low, goodput.high, goodput.mean) == (6.0, 0.0, 8.0, 3.0)
    assert (goodput.last_at_s, goodput.low_at_s, goodput.high_at_s) == (T + 60, T + 20, T + 60)
    rows = [(row.at_s - T, row.last, row.low, row.high, row.mean, row.down_s) for row in goodput.rows]
    assert rows == [(0, 0.0, 0.0, 3.0, 1.0, 0.0), (30, 4.0, 3.0, 4.5, 4.0, 20.0), (60, 6.0, 5.0, 8.0, 6.0, 0.0)]
    attainment = found.series["attainment"]
    assert (attainment.mean, attainment.low) == (0.75, 0.5)
    assert attainment.rows[2].last is None, "nothing ended then, but there is a record"
    assert attainment.rows[2].down_s == 0.0


def test_a_second_that_was_not_sampled_is_no_gap() -> None:
    found = report(a_view(1), ["goodput_per_s"], 70.0, 3.0, utc)
    assert found.down == ()
    assert found.series["goodput_per_s"].rows[1].down_s == 0.0
    assert report(a_view(3), ["goodput_per_s"], 70.0, 3.0, utc).down == (Gap(T + 9, T + 15),)


def test_rows_begin_at_round_local_times_and_are_no_finer_than_the_answer() -> None:
    india = 5.5 * 3600
    rows = report(a_view(), ["attainment"], 70.0, 3600.0, lambda _: india).series["attainment"].rows
    assert [(row.at_s + india) % 3600 for row in rows] == [0.0]
    assert report(a_view(), ["attainment"], 70.0, 1.0, utc).every_s == 10.0
    assert report(a_view(60), ["attainment"], 70.0, 90.0, utc).every_s == 120.0


@pytest.mark.parametrize(("day", "every_h", "begins"), [
    ("2026-10-25", 1, ["00:00", "01:00", "02:00", "02:00", "03:00", "04:00", "05:00"]),
    ("2026-10-25", 2, ["00:00", "02:00", "04:00"]),
    ("2026-10-25", 4, ["00:00", "04:00"]),
    ("2026-03-29", 2, ["00:00", "03:00", "04:00", "06:00"]),
    ("2026-03-29", 4, ["00:00", "04:00"]),
    ("2026-10-26", 2, ["00:00", "02:00", "04:00", "06:00"]),
])  # fmt: skip
def test_wide_rows_stay_at_their_hours_where_clocks_change(day: str, every_h: int, begins: list[str]) -> None:
    """Berlin's clocks go back at 03:00 on 2026-10-25: the row from 02:00 on is an hour longer, none is moved."""
    with local("Europe/Berlin"):
        midnight = datetime.fromisoformat(day).timestamp()
        times = tuple(int(midnight) + 600 * index for index in range(42))
        view = SeriesView(step_s=600, times=times, series={PULSE: Column(last=(1.0,) * 42)})
        rows = report(view, [PULSE], 7 * 3600.0, every_h * 3600.0, zone_s).series[PULSE].rows
        assert [datetime.fromtimestamp(row.at_s).strftime("%H:%M") for row in rows] == begins
    assert rows[0].at_s == midnight
    assert [row.at_s for row in rows] == sorted({row.at_s for row in rows})


def test_a_record_that_begins_after_clocks_went_back_is_in_the_row_of_before() -> None:
    with local("Europe/Berlin"):
        midnight = datetime.fromisoformat("2026-10-25").timestamp()
        view = SeriesView(step_s=600, times=(int(midnight) + 4 * 3600 + 1800,), series={PULSE: Column(last=(1.0,))})
        rows = report(view, [PULSE], 3600.0, 4 * 3600.0, zone_s).series[PULSE].rows
    assert [row.at_s for row in rows] == [midnight], "at 03:30, of the row that began at 00:00"


def test_what_is_before_the_record_is_left_out_of_every_series() -> None:
    begun = from_record(a_view())
    assert (begun.times[0], len(begun.times)) == (T + 10, 6)
    assert begun.series["goodput_per_s"].low == (1.0, 0.0, None, None, 3.0, 5.0)
    assert begun.series["attainment"] == Column(last=(1.0, None, None, None, 0.5, None))


def test_without_any_record_nothing_is_known() -> None:
    empty = SeriesView(step_s=10.0, times=(T, T + 10))
    found = report(empty, ["attainment"], 70.0, 10.0, utc)
    assert (found.from_s, found.down, found.series["attainment"].mean) == (None, (), None)
    assert report(SeriesView(step_s=1.0), ["attainment"], 70.0, 10.0, utc).series["attainment"].rows == ()


@pytest.mark.parametrize(("span_s", "every_s", "step_s"), [
    (86400, 600, 60), (86400, 3600, 60), (86400, 10, 60), (600, 10, 1), (1200, 7, 1), (3600, 600, 10), (3600, 7, 10),
    (21600, 90, 30),
])  # fmt: skip
def test_the_step_that_is_asked_for_divides_the_rows(span_s: float, every_s: float, step_s: float) -> None:
    assert step_for(span_s, every_s) == step_s
    assert span_s / step_s <= 1500


def test_about_thirty_rows_by_default() -> None:
    assert [nice_every(span_s) for span_s in (30, 600, 3600, 86400)] == [1.0, 20.0, 120.0, 3600.0]


def test_figures_read_as_everywhere() -> None:
    shown = {
        name: figure(name)(0.5)
        for name in (
            "goodput_per_s",
            "class.a.ttft_p50_s",
            "attainment",
            "kv_use",
            "instance.a.speed",
            "queue_depth",
            "hit_pool_ssd",
            "cost_per_good",
        )
    }
    assert [*shown.values()] == ["0.50/s", "500.0 ms", "50.0%", "50.0%", "x0.50", "0.5", "50.0%", "$0.50"]


def test_every_series_of_the_documents_has_a_meaning_here() -> None:
    text = (Path(__file__).parents[2] / "docs" / "feed.md").read_text()
    table = text.split("| series | what |")[1].split("\n\n")[0]
    named = re.findall(r"`([\w.]+)`", table)
    owner = ""
    for name in named:
        owner = name.rpartition(".")[0] if name.startswith(("class.", "model.", "instance.")) else owner
        full = f"{owner}{name}" if name.startswith(".") else name
        assert meaning(full), full
    assert set(series_names.FLEET) <= set(named)


def drawn(ascii: bool = False, width: int = 100) -> list[str]:
    view = a_view()
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    names = ["goodput_per_s"]
    show_report(console, report(view, names, 70.0, 30.0, utc), {names[0]: recorded(view, names[0])}, True, ascii)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@contextmanager
def local(zone: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("TZ", zone)
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def _utc() -> Iterator[None]:
    with local("UTC"):
        yield


@pytest.mark.usefixtures("_utc")
def test_the_chart_shows_gaps_as_gaps_and_zero_as_a_line_at_the_bottom() -> None:
    lines = drawn(ascii=True)
    chart = [one.split("|")[1] for one in lines if "|" in one]
    assert len(chart) == 8
    each = 90 / 6  # columns a step, from where the record begins
    columns = {index: {row[round(each * (index + 0.5))] for row in chart} for index in range(6)}
    assert all(columns[index] == {" "} for index in (2, 3)), "unknown is empty"
    assert chart[-1][round(each * 1.5)] == "#", "0 is drawn"
    assert chart[0][round(each * 5.5)] == "#"
    axis = next(one for one in lines if "+" in one).split("+")[1]
    assert {axis[round(each * (index + 0.5))] for index in range(6)} == {"-", "x"}
    assert {axis[round(each * (index + 0.5))] for index in (2, 3)} == {"x"}
    assert "the record begins at 01-15 08:00:10" not in lines, "one step is no delay"
    assert "no record from 01-15 08:00:30 to 01-15 08:00:50: the control plane did not run" in lines
    assert "  last 6.00/s, mean 3.00/s, min 0.00/s at 01-15 08:00:20, max 8.00/s at 01-15 08:01:00" in lines
    assert re.search(r"01-15 08:00:30 +4.00/s +4.00/s +3.00/s +4.50/s  no record for 20 s", "\n".join(lines))
    assert max(map(len, lines)) <= 100
    assert any(0x2800 < ord(sign) < 0x2900 for one in drawn() for sign in one)


@pytest.mark.usefixtures("_utc")
def test_of_what_has_ended_the_last_value_has_its_time() -> None:
    view = SeriesView(
        step_s=10, times=tuple(T + 10 * index for index in range(6)),
        series={"attainment": Column(last=(1.0, 0.5, None, None, None, None)), PULSE: Column(last=(0.0,) * 6)},
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=100, highlight=False, markup=False)
    show_report(console, report(view, ["attainment", PULSE], 60.0, 30.0, utc), {}, False, False)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "last 50.0% at 01-15 08:00:10, mean 75.0%" in text
    assert "last 0, mean 0" in text


@pytest.mark.parametrize("width", [6, 10, 12, 27, 39])
def test_a_narrow_terminal_gets_figures_without_a_chart(width: int) -> None:
    text = " ".join(drawn(ascii=True, width=width))
    assert "3.00/s" in text
    assert "|" not in text


@pytest.fixture
def past(fleet: Fake) -> Fake:
    fleet.series = a_view()
    fleet.series_names = NAMES
    return fleet


def test_without_a_name_the_series_are_listed(run, past: Fake) -> None:
    ran = run("series", "--url", past.url)
    assert ran.code == 0, ran.err
    assert re.search(r"goodput_per_s +good requests a second, over 60 s", ran.out)
    assert "of one class, with --class (chat, default):" in ran.out
    assert "of one instance, with --instance (n.1):" in ran.out
    listed = msgspec.json.decode(run("series", "--json", "--url", past.url).out, type=SeriesView)
    assert listed.names == NAMES
    own = run("series", "--instance", "n.1", "--url", past.url).out
    assert "tpot_p50_s" in own
    assert "goodput_per_s " not in own
    assert "of the fleet" not in own
    ran = run("series", "--class", "chap", "--url", past.url)
    assert ran.code == 1
    assert "no traffic class 'chap' has left a record" in ran.err


def test_a_star_stays_one_in_the_question(run, past: Fake) -> None:
    ran = run("series", "*", "stage.*", "goodput", "ttft_p90", "--url", past.url)
    assert ran.code == 0, ran.err
    assert past.asked[-1][0].endswith("names=*,stage.*,in_flight"), "names of hundreds are too long for an address"
    assert "attainment: share of requests" in ran.out
    ran = run("series", "stage.*", "goodput", "--url", past.url)
    assert past.asked[-1][0].endswith("names=stage.*,goodput_per_s,in_flight")


def test_yesterday_is_read_by_its_short_name(run, past: Fake) -> None:
    ran = run("series", "goodput", "--since", "24h", "--every", "30s", "--url", past.url)
    assert ran.code == 0, ran.err
    assert [path for path, _ in past.asked[1:]] == [
        "GET /v1/series?since_s=-86400&step_s=60.0&names=in_flight",
        "GET /v1/series?since_s=-110.0&step_s=1&names=goodput_per_s,in_flight",
    ], "as fine as it can be for what there is"
    assert "the record begins at" in ran.out
    assert "goodput_per_s: good requests a second, over 60 s" in ran.out
    assert "no record for 20 s" in ran.out
    assert not any(0x2800 < ord(sign) < 0x2900 for sign in ran.out), "a chart is for terminals"
    document = msgspec.json.decode(run("series", "goodput", "--json", "--url", past.url).out)
    assert (document["down"], document["step_s"]) == ([{"from_s": T + 30, "until_s": T + 50}], 10.0)
    assert document["series"]["goodput_per_s"]["mean"] == 3.0


def test_a_class_an_instance_and_a_part_of_the_day(run, past: Fake) -> None:
    args = ("--since", "2h", "--until", "1h", "--url", past.url)
    assert run("series", "ttft_p50", "--class", "chat", *args).code == 0
    assert past.asked[-2][0] == "GET /v1/series?since_s=-7200&step_s=60.0&names=in_flight&until_s=-3600"
    assert past.asked[-1][0].endswith("since_s=-3710.0&step_s=1&names=class.chat.ttft_p50_s,in_flight&until_s=-3600")
    assert run("series", "tpot_p50", "--instance", "n.1", *args).code == 0
    assert "names=instance.n.1.tpot_p50_s,in_flight" in past.asked[-1][0]
    ran = run("series", "goodput", "--since", "3d", "--url", past.url)
    assert "the control plane keeps the last 24 hours" in ran.out
    assert "since_s=-86400" in past.asked[-2][0]


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (("godput",), 1, "did you mean goodput_per_s"),
    (("goodput", "--since", "yesterday"), 2, "'yesterday' is no time; give seconds or such as 30m, 24h, 2d"),
    (("goodput", "--since", "1h", "--until", "2h"), 2, "--since 1h is not before --until 2h"),
    (("goodput", "--since", "48h", "--until", "30h"), 2, "--until 30h is before what the control plane keeps"),
    (("goodput", "--every", "0"), 2, "--every must be above 0"),
    (("goodput", "--class", "a", "--instance", "b"), 2, "exclude each other"),
])  # fmt: skip
def test_what_cannot_be_is_said(run, past: Fake, arguments: tuple[str, ...], code: int, said: str) -> None:
    ran = run("series", *arguments, "--url", past.url)
    assert ran.code == code
    assert said in ran.err
