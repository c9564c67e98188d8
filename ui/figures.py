"""How figures read, everywhere: milliseconds, shares, rates, money, counts, bytes. "-" is what is not known.

Only figures and their units: words come from ui/words.
"""

from __future__ import annotations

NONE = "-"
INFINITE = "\u221e"
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def seconds(value: float | None) -> str:
    """A latency: 12.3 ms below a second, else 1.23 s."""
    if value is None:
        return NONE
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def excess(value: float) -> str:
    """By how much something is over a limit of seconds: never 0."""
    return "<0.1 ms" if value < 5e-5 else seconds(value)


def share(value: float | None) -> str:
    """0.987 is 98.7%."""
    return NONE if value is None else f"{value:.1%}"


def span(value: float) -> str:
    """A duration of seconds to days: 45 s, 12 min, 3.5 h, 2.0 d."""
    if value < 120:
        return f"{value:.0f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h" if value < 172800 else f"{value / 86400:.1f} d"


def per_s(value: float | None, digits: int = 2) -> str:
    """A rate: 1.25/s."""
    return NONE if value is None else f"{value:.{digits}f}/s"


def per_gpu(value: float | None) -> str:
    """A rate per GPU, which is small: 0.125/s."""
    return per_s(value, 3)


def money(value: float | None) -> str:
    """US dollars: $1.25, $0.00042 with two digits that count. None is infinite: nothing good was bought."""
    if value is None:
        return INFINITE
    if value == 0 or abs(value) >= 0.01:
        return f"${value:,.2f}"
    return f"${value:.2g}" if abs(value) >= 1e-4 else f"${value:.1e}"


def count(value: float | None) -> str:
    """A whole number, its thousands apart: 12,345."""
    return NONE if value is None else f"{value:,.0f}"


def short_count(value: float | None) -> str:
    """A count in little room: 950, 12.3k, 4.5M."""
    if value is None:
        return NONE
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def num_bytes(value: float | None) -> str:
    """Bytes in binary units: 512 B, 1.5 MiB."""
    if value is None:
        return NONE
    for unit in _BINARY[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_BINARY[-1]}"


def signed_share(value: float | None) -> str:
    """A change: +18%, -3%."""
    return NONE if value is None else f"{value:+.0%}"
