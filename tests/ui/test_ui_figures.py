"""How figures read, and that signs and colours tell things apart."""

from __future__ import annotations

import pytest

from ui import figures, looks


@pytest.mark.parametrize(
    ("made", "read"),
    [
        (figures.seconds(None), "-"), (figures.seconds(0.0123), "12.3 ms"), (figures.seconds(1.234), "1.23 s"),
        (figures.excess(1e-5), "<0.1 ms"), (figures.excess(0.0003), "0.3 ms"),
        (figures.share(0.98765), "98.8%"), (figures.share(None), "-"), (figures.signed_share(0.184), "+18%"),
        (figures.span(45), "45 s"), (figures.span(720), "12 min"), (figures.span(9000), "2.5 h"),
        (figures.span(200_000), "2.3 d"), (figures.per_s(1.234), "1.23/s"), (figures.per_gpu(0.1236), "0.124/s"),
        (figures.money(None), "\u221e"), (figures.money(1234.5), "$1,234.50"), (figures.money(0.01), "$0.01"),
        (figures.money(0.00042), "$0.00042"), (figures.money(0.000012345), "$1.2e-05"), (figures.money(0), "$0.00"),
        (figures.count(12345), "12,345"), (figures.short_count(950), "950"), (figures.short_count(12345), "12.3k"),
        (figures.short_count(999_960), "1.0M"), (figures.short_count(4.5e9), "4.5G"), (figures.num_bytes(512), "512 B"),
        (figures.num_bytes(1.5 * 1024**2), "1.5 MiB"), (figures.num_bytes(1024**5), "1024.0 TiB"),
    ],
)  # fmt: skip
def test_figures(made: str, read: str) -> None:
    assert made == read


def contrast(colour: str, ground: str) -> float:
    """WCAG 2's contrast ratio."""

    def light(text: str) -> float:
        parts = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(colour), light(ground)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("table", [looks.ROLES, looks.STATES, looks.STAGES, looks.VERDICTS])
def test_signs_tell_apart_without_colour_and_colours_can_be_read(table: dict[str, looks.Look]) -> None:
    for sign in ("sign", "ascii"):
        signs = [getattr(one, sign) for one in table.values()]
        assert len(set(signs)) == len(signs)
        assert all(len(one) == 1 for one in signs)
    assert all(one.ascii.isascii() for one in table.values())
    for one in (*table.values(), looks.UNKNOWN):
        for theme, ground in looks.GROUNDS.items():
            assert contrast(one.colour(theme), ground) >= 4.5, (one, theme)


def test_what_nobody_knows_has_a_look_too() -> None:
    assert looks.role("dancer") == looks.state("asleep") == looks.stage("lunch") == looks.UNKNOWN
    assert looks.role("decode").sign == "D"
