"""Lines, charts and tables as data: widths in columns, braille and ASCII, sorting, filtering, what fits."""

from __future__ import annotations

import pytest

from ui.tui.charts import Curve, bar, chart, nice_top, num_columns, sampled, stacked
from ui.tui.grid import Cell, Grid, Head, Order, Row, arranged, drawn, figure, text
from ui.tui.lines import Span, beside, cells, cut, fit, line, pad, plain, spaced, wrap


def test_a_text_takes_the_columns_it_is_given() -> None:
    assert cut("goodput", 10) == "goodput   "
    assert cut("goodput", 4) == "goo…"
    assert pad("7", 3, right=True) == "  7"
    assert cut("有效吞吐", 5) == "有效…"
    assert cells(line("有效")) == 4
    assert cut("x", 0) == ""


@pytest.mark.parametrize("width", range(1, 14))
def test_a_line_is_fitted_exactly(width: int) -> None:
    spans = (Span("abc", "good"), Span("有效", "bad"), Span("xyz"))
    assert cells(fit(spans, width)) == width
    assert plain(fit(spans, 10)) == "abc有效xyz"
    assert plain(fit(spans, 5)).endswith("…")


def test_what_others_wrote_gives_the_terminal_no_orders() -> None:
    assert plain(line("n\x1b[2J\x9b1\r\n\u202e\t0")) == "n[2J10"
    assert plain(line("有效　x\xa0é…─⣿")) == "有效　x\xa0é…─⣿"


def test_sentences_wrap_at_words_and_chinese_anywhere() -> None:
    assert wrap("move n3 from P to D", 8) == ["move n3", "from P", "to D"]
    assert wrap("目標都達成了瓶頸是", 8) == ["目標都達", "成了瓶頸", "是"]
    assert wrap("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert wrap("one two three four", 9, most=1) == ["one two…"]
    assert wrap("", 9) == [""]


def test_blocks_stand_beside_each_other() -> None:
    rows = beside([[line("a")], [line("b"), line("c")]], [3, 2], gap=1)
    assert [plain(row) for row in rows] == ["a   b ", "    c "]
    assert plain(spaced([line("a"), (), line("b")])) == "a  b"


def test_a_filled_curve_is_an_area_and_another_a_line() -> None:
    top = [8.0] * num_columns(3, ascii=False)
    filled = chart([Curve(top, "goodput", "#", filled=True)], 3, 2, 8.0, ascii=False)
    assert [plain(one) for one in filled] == ["⣿⣿⣿", "⣿⣿⣿"]
    drawn_line = chart([Curve(top, "throughput", "*")], 3, 2, 8.0, ascii=False)
    assert [plain(one) for one in drawn_line] == ["⠉⠉⠉", "   "]


def test_what_is_not_known_is_left_empty_and_zero_is_no_area() -> None:
    lines = chart([Curve([None, None, 4.0, 4.0, 0.0, 0.0], "goodput", "#", filled=True)], 3, 1, 4.0, ascii=False)
    assert plain(lines[0]) == " ⣿ "
    ascii_lines = chart([Curve([None, 4.0, 2.0], "goodput", "#")], 3, 3, 4.0, ascii=True)
    assert [plain(one) for one in ascii_lines] == [" ##", "  #", "   "]


def test_samples_hold_for_a_while_and_no_longer() -> None:
    assert sampled([0.0, 10.0], [1.0, 2.0], 0.0, 40.0, 4, 15.0) == [2.0, 2.0, None, None]
    assert sampled([], [], 0.0, 10.0, 2, 5.0) == [None, None]


@pytest.mark.parametrize(
    ("largest", "top"), [(0.0, 1.0), (0.07, 0.08), (9.7, 10.0), (10.4, 15.0), (1.0, 1.0), (640, 800)]
)
def test_the_scale_ends_at_a_round_number(largest: float, top: float) -> None:
    assert nice_top([[None, largest]]) == pytest.approx(top)


def test_bars_show_shares_and_signs() -> None:
    assert plain(bar(0.5, 4, "good", ascii=True)) == "##.."
    assert plain(bar(0.55, 4, "good", ascii=False)) == "██▏·"
    assert plain(bar(7.0, 4, "good", ascii=False)) == "████"
    assert plain(stacked([(1.0, "dim", "q"), (0.0, "warn", "a"), (3.0, "decode", "d")], 8, ascii=True)) == "q-d-----"
    assert plain(stacked([], 4, ascii=True)) == "...."


def grid(num: int = 4) -> Grid:
    heads = (Head("name"), Head("running", right=True), Head("hardware", rank=2), Head("price", right=True, rank=1))
    rows = tuple(
        Row(f"n{index}", (text(f"n{index}"), figure(str(index * 5), index * 5), text("H800"), figure("-", None)))
        for index in range(num)
    )
    return Grid(heads, rows)


def test_a_table_sorts_by_its_values_and_filters_by_its_texts() -> None:
    order = Order().next([0, 1]).next([0, 1]).next([0, 1])
    assert order == Order(column=1)
    assert [row.id for row in arranged(grid(), order.next([0, 1])).rows] == ["n3", "n2", "n1", "n0"]
    assert [row.id for row in arranged(grid(), Order(needle="N1")).rows] == ["n1"]
    assert Order(column=1, reverse=True).next([0, 1]) == Order()
    assert Order(column=2).next([0, 1]) == Order(column=0), "a column that is no longer shown"
    cells_of = (Cell("9", 9.0), Cell("10", 10.0), Cell("-", float("-inf")))
    mixed = Grid((Head("x"),), tuple(Row(cell.text, (cell,)) for cell in cells_of))
    assert [row.id for row in arranged(mixed, Order(column=0)).rows] == ["-", "9", "10"]


def test_a_narrow_table_leaves_out_its_least_columns() -> None:
    wide = plain(drawn(grid(), 60, 9)[0])
    assert "hardware" in wide
    assert "price" in wide
    narrow = plain(drawn(grid(), 28, 9)[0])
    assert "hardware" not in narrow
    assert "price" in narrow
    assert all(cells(one) == 28 for one in drawn(grid(), 28, 9, cursor=1))


def test_the_cursor_is_a_sign_and_the_order_too() -> None:
    lines = drawn(grid(), 60, 3, cursor=1, top=1, order=Order(column=1, reverse=True))
    assert "running▼" in plain(lines[0])
    assert plain(lines[1]).startswith("▸ n1")
    assert [plain(one)[2:4] for one in lines[1:]] == ["n1", "n2"]
    assert plain(drawn(grid(), 60, 3, cursor=0, ascii=True)[1]).startswith("> n0")


def test_columns_do_not_shrink_again() -> None:
    widest: dict[int, int] = {}
    long = Grid((Head("a"), Head("b")), (Row("x", (text("long value"), text("z"))),))
    short = Grid((Head("a"), Head("b")), (Row("x", (text("y"), text("z"))),))
    drawn(long, 40, 2, widest=widest)
    assert plain(drawn(short, 40, 2, widest=widest)[1]).index("z") == 12
