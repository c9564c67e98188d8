"""What every drawing needs: the words, whether only ASCII may be used, the time zone; and signs and tones of things."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, tzinfo

from rich.cells import cell_len

from transfer.said import Said
from ui import figures, looks
from ui.looks import Look
from ui.tui.lines import Line, Span, Tone
from ui.words import Words

STATE_TONES: dict[str, Tone] = {
    "ready": "good", "cordoned": "warn", "draining": "warn", "switching": "warn", "lost": "bad", "joining": "dim",
}  # fmt: skip
VERDICT_TONES: dict[str, Tone] = {"met": "good", "missed": "bad", "idle": "dim", "degraded": "warn", "stale": "warn"}
STAGE_TONES: dict[str, Tone] = {
    "queue": "dim", "decode_admission": "warn", "prefill": "prefill", "transfer": "kv_pool", "decode": "decode",
}  # fmt: skip
ROLE_TONES: dict[str, Tone] = {"prefill": "prefill", "decode": "decode", "mixed": "mixed", "kv_pool": "kv_pool"}


@dataclass(frozen=True, slots=True)
class Pen:
    """zone None: the machine's own."""

    words: Words
    ascii: bool = False
    zone: tzinfo | None = None

    def say(self, key: str, **values: object) -> str:
        return self.words.say(key, **values)

    def name(self, group: str, name: str) -> str:
        """What a role, state, stage and so on is called; its own name where the catalogue has none."""
        key = f"{group}.{name}"
        return self.words.say(key) if self.words.has(key) else name

    def sentence(self, said: Said | None, english: str) -> str:
        return self.words.sentence(said, english)

    def sign(self, look: Look) -> str:
        return look.ascii if self.ascii else look.sign

    def role(self, role: str) -> Span:
        """Letter and name."""
        return Span(f"{looks.role(role).sign} {self.name('role', role)}", ROLE_TONES.get(role, ""))

    def state(self, state: str) -> Span:
        return Span(f"{self.sign(looks.state(state))} {self.name('state', state)}", STATE_TONES.get(state, ""))

    def clock(self, at_s: float) -> str:
        return self._at(at_s, "%H:%M:%S")

    def date(self, at_s: float) -> str:
        return self._at(at_s, "%m-%d %H:%M:%S")

    def stamp(self, at_s: float) -> str:
        """For the name of a file."""
        return self._at(at_s, "%Y%m%d-%H%M%S")

    def _at(self, at_s: float, form: str) -> str:
        try:
            return datetime.fromtimestamp(at_s, self.zone).strftime(form)
        except (OverflowError, ValueError, OSError):  # in no year that there is
            return figures.NONE

    def rule(self, title: str, width: int) -> Line:
        """A heading with a line after it."""
        mark = "-" if self.ascii else "─"
        return (Span(f"{title} ", "title"), Span(mark * max(0, width - cell_len(title) - 1), "dim"))

    def arrow(self) -> str:
        return "->" if self.ascii else "→"
