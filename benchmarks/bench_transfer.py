"""KV transfer between two processes on this host, side by side with a bare blocking socket and with memcpy.

Every round runs ours and the yardstick one after the other; medians are printed and, with --json, written as JSON
lines {name, ours, peer, peer_name, unit, ratio}. `phaseplane bench kv` measures the pool, the SSD tier and peers too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import uvloop

from nodes.benches.measuring import GB, Seconds, alternate
from nodes.benches.movers import Case, Mover, Movers

CASES = (
    Case("kv_tcp", shm=False),
    Case("kv_tcp_no_checksum", shm=False, checksum=False),
    Case("kv_tcp_scattered", shm=False, scattered=True),
    Case("kv_tcp_16_streams", shm=False, streams=16),
    Case("kv_tcp_4_links", shm=False, port_options={"links": 4}),
    Case("kv_shm", shm=True),
    Case("kv_shm_checksum", shm=True, checksum=True),
    Case("kv_shm_scattered", shm=True, scattered=True),
)


async def measure(num_blocks: int, rounds: int, only: str) -> list[dict[str, Any]]:
    lines = []
    async with Movers(num_blocks) as movers:
        for case in [case for case in CASES if only in case.name]:
            mover = await movers.open(case)
            peer_name, peer = ("memcpy", movers.by_memcpy) if case.shm else ("blocking socket", movers.over_socket)
            taken = await alternate(rounds, {"ours": lambda mover=mover: pushed(mover), "peer": peer})
            speeds = [movers.num_bytes / taken[who]["write"] / GB for who in ("ours", "peer")]
            lines.append(line(case.name, *speeds, peer_name))
    return lines


async def pushed(mover: Mover) -> Seconds:
    return {"write": await mover.push()}


def line(name: str, ours: float, peer: float, peer_name: str) -> dict[str, Any]:
    print(f"{name:22} {ours:6.2f} GB/s   {peer_name:16} {peer:6.2f} GB/s   ratio {ours / peer:.2f}", flush=True)
    return {
        "name": name, "ours": round(ours, 3), "peer": round(peer, 3), "peer_name": peer_name, "unit": "GB/s",
        "ratio": round(ours / peer, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results here, as JSON lines")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="run only the cases whose name contains this")
    parser.add_argument("--blocks", type=int, default=256, help="KV blocks moved in each round (720 KiB each)")
    args = parser.parse_args()
    lines = uvloop.run(measure(args.blocks, args.rounds, args.only))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text("".join(json.dumps(entry) + "\n" for entry in lines))


if __name__ == "__main__":
    main()
