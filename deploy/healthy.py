"""A container's health check: whether the URL in /tmp/ready is answered, be it by asking for a key.

Imports little: it runs often.
"""

from __future__ import annotations

import sys
from http.client import HTTPConnection, HTTPException
from pathlib import Path

TIMEOUT_S = 5.0
SERVES = (200, 401)


def main() -> int:
    try:
        url = Path("/tmp/ready").read_text(encoding="ascii")
        host, _, path = url.removeprefix("http://").partition("/")
        connection = HTTPConnection(host, timeout=TIMEOUT_S)
        connection.request("GET", f"/{path}")
        answer = connection.getresponse()
    except (OSError, HTTPException) as error:
        print(error)
        return 1
    print(answer.read(500).decode(errors="replace"))
    return 0 if answer.status in SERVES else 1


if __name__ == "__main__":
    sys.exit(main())
