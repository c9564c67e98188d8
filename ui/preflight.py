"""Asks the control plane what it thinks of its settings, before anything is started. It starts nothing that stays."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from ui.processes import child_environment, last_word

CHECK_S = 60.0


def control_fault(argv: Sequence[str]) -> str | None:
    """The sentence in which the control plane `argv` refuses its settings (file and variables); None when it would not.

    A program that cannot run, or does not answer in time, is a fault too.
    """
    try:
        ran = subprocess.run(
            [*argv, "--check"], capture_output=True, text=True, timeout=CHECK_S, env=child_environment(), check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the control plane cannot be asked about its settings ({error})"
    if ran.returncode == 0:
        return None
    return last_word(ran.stderr.splitlines())
