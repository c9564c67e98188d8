"""Runs a command that ends when its parent does: `python child.py PARENT_PID COMMAND...`, in vLLM's interpreter."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(arguments[0]):  # it died before we asked
        sys.exit(1)
    os.execv(arguments[1], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
