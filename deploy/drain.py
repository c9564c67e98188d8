"""Empties a node before it is stopped: `drain.py API_KEY_FILE SECONDS`, a pod's preStop hook.

Its control plane and its name are those that /tmp/ready asks about. What is left after SECONDS, or where the control
plane refuses because nobody else could do the work, is placed again elsewhere when the node goes.
"""

from __future__ import annotations

import json
import sys
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

READY = Path("/tmp/ready")
TIMEOUT_S = 10.0
PAUSE_S = 1.0
REFUSED_S = 10.0
"""A refusal may be for a moment: the fleet had just changed, or a plan moved this instance."""


class Fleet:
    """The control plane as a node's client."""

    def __init__(self, host: str, key: str) -> None:
        self._host, self._headers = host, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Status and answer. Raises OSError, HTTPException, ValueError."""
        connection = HTTPConnection(self._host, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), self._headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def left(self, name: str) -> tuple[int, int]:
        """The fleet's version, and what the instance still does: requests, and KV on its way to pools."""
        _, fleet = self.ask("GET", "/v1/fleet")
        work = [
            one["num_running"] + one["num_waiting"] + one["unsettled"]
            for one in fleet["instances"]
            if one["id"] == name and one["state"] != "lost"
        ]
        return fleet["version"], sum(work)

    def drain(self, name: str) -> str | None:
        """None once it is being emptied; else why not."""
        version, _ = self.left(name)
        body = {"base_version": version, "idempotency_key": f"stop-{name}", "actor": "stop of a pod"}
        status, answer = self.ask("POST", f"/v1/instances/{name}/drain", body)
        return None if status == 200 else str(answer["error"]["message"])


def empty(fleet: Fleet, name: str, seconds: float) -> str | None:
    """None when nothing is left; else a sentence. Returns in about `seconds` at the latest."""
    end = time.monotonic() + seconds
    refused_until = time.monotonic() + min(REFUSED_S, seconds)
    while (refusal := fleet.drain(name)) is not None:
        if time.monotonic() >= refused_until:
            return refusal
        time.sleep(PAUSE_S)
    while (work := fleet.left(name)[1]) > 0:
        if time.monotonic() >= end:
            return f"after {seconds:.0f} s {name} still has {work} requests or stores; they go on elsewhere"
        time.sleep(PAUSE_S)
    return None


def main(key_file: str, seconds: str) -> int:
    try:
        url = urlsplit(READY.read_text(encoding="ascii"))
        name = parse_qs(url.query)["instance"][0]
        reason = empty(Fleet(url.netloc, Path(key_file).read_text(encoding="ascii")), name, float(seconds))
    except (OSError, HTTPException, ValueError, KeyError) as error:
        reason = f"the control plane cannot be asked to drain this node: {error}"
    if reason is not None:
        print(reason, file=sys.stderr)
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
