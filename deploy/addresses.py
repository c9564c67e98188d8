"""Prints the IPv4 addresses of network cards, with commas between: `addresses.py rail0,rail1`."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

SIOCGIFADDR = 0x8915
MAX_NAME_BYTES = 15


def address(card: str) -> str:
    """Raises OSError when there is no such card, or it has no IPv4 address."""
    request = struct.pack("256s", card.encode()[:MAX_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return socket.inet_ntoa(fcntl.ioctl(asking, SIOCGIFADDR, request)[20:24])


def main(cards: str) -> int:
    found = []
    for card in (name.strip() for name in cards.split(",")):
        try:
            found.append(address(card))
        except OSError as error:
            there = ", ".join(name for _, name in socket.if_nameindex())
            print(f"network card {card!r} has no IPv4 address ({error.strerror}); there are {there}", file=sys.stderr)
            return 1
    print(",".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
