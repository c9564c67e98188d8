"""How a program that a `phaseplane` command starts ends: one line on standard error, an exit status, never a trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from transfer.errors import PhaseplaneError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a flag in one line. Exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"error: {message}; run `{self.prog} --help`\n")


def run(program: str, extras: str, body: Callable[[], None]) -> int:
    """The exit status of `body`, whose expected errors are said in one line. extras: "native,plan", the extras of the
    distribution that bring what it imports."""
    try:
        body()
    except ModuleNotFoundError as error:
        return _failed(f"{program} needs {error.name}; run `pip install 'phaseplane[{extras}]'`")
    except PhaseplaneError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename} cannot be read or written: {error.strerror}")
    except KeyboardInterrupt:
        return _failed("interrupted; run the command again", EXIT_INTERRUPTED)
    return 0


def _failed(sentence: str, status: int = EXIT_FAILED) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return status
