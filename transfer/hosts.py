"""Names of this machine: what only it can reach, and which names a server that asks for no key answers to.

A browser sends the name in its address bar as Host. A page of another site whose name was made to point here (DNS
rebinding) sends its own, and is told by that.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

LOCAL_NAME = "localhost"


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect. A name other than localhost may resolve to anything: False."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == LOCAL_NAME


def is_foreign(host_header: str | None, bound: str, allowed: Collection[str] = ()) -> bool:
    """Whether a request to a server bound to loopback names another machine. allowed: names it has besides, in any
    case, without a port. Beyond loopback, and without the header (no browser leaves it out), nothing is foreign."""
    if host_header is None or not is_loopback(bound):
        return False
    name = host_name(host_header)
    return not is_loopback(name) and name not in {bound.lower(), *(one.lower() for one in allowed)}


def host_name(host_header: str) -> str:
    """Without port and brackets, in lower case."""
    text = host_header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text
