"""The one error the command line shows: a sentence that names the next command, and an exit status."""

from __future__ import annotations

from transfer.errors import PhaseplaneError
from transfer.said import Said

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class CliError(PhaseplaneError):
    """Shown as `error: SENTENCE`; never with a traceback."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class UsageFault(CliError):
    """What the user typed cannot mean anything."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_USAGE)


class ApiError(CliError):
    """The fleet answered with an error; `status` is the HTTP status. said: what it says, for screens."""

    def __init__(self, message: str, status: int, said: Said | None = None) -> None:
        self.status, self.said = status, said
        super().__init__(message)


class Unreachable(CliError):
    """Nothing answers at the fleet's URL, or what answers is not a Phaseplane control plane."""
