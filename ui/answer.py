"""One streamed completion as it arrives: its times, its text, and whether it is right and whole. It reads no socket."""

from __future__ import annotations

from dataclasses import dataclass, field

from ui.client import error_message
from ui.completion import CHUNKS, Times, Usage
from ui.measure import Ending
from ui.sse import Event
from ui.workload import Job


@dataclass(slots=True)
class Answer:
    """What one answer has shown so far; times are of the event loop."""

    times: Times = field(default_factory=Times)
    finish: str | None = None
    usage: Usage | None = None
    text: list[str] = field(default_factory=list)
    error: str = ""

    def take(self, event: Event, now: float) -> None:
        """One event that is not [DONE]."""
        chunk = CHUNKS.decode(event.data)
        if chunk.error is not None:
            self.error = error_message(event.data) or "the stream carried an error without a message"
            return
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            self.finish = choice.finish_reason or self.finish
            if choice.text:
                self.text.append(choice.text)
            self.times.mark(choice, now)


def judge(job: Job, answer: Answer) -> tuple[Ending, str]:
    """Whether a stream that ended is a right and whole answer."""
    if answer.error:
        return Ending.ERROR, answer.error
    if answer.finish is None:
        return Ending.ERROR, "the stream ended without a finish_reason"
    text = "".join(answer.text)
    if job.expect is not None and text != job.expect:
        same = next((i for i, (a, b) in enumerate(zip(text, job.expect, strict=False)) if a != b), None)
        place = min(len(text), len(job.expect)) if same is None else same
        return Ending.WRONG, f"the text differs from the expected one at character {place}"
    usage = answer.usage
    if job.ignore_eos and answer.finish == "length" and usage is not None and usage.completion_tokens != job.max_tokens:
        return Ending.WRONG, f"{usage.completion_tokens} tokens came instead of {job.max_tokens}"
    return Ending.COMPLETED, ""
