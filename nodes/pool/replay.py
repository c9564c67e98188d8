"""Replays a recorded trace through the pool's own index: hit rate by capacity, beside LRU and what is possible at best.

A hit is a leading block of a prompt that the index holds when the prompt arrives; the rest is then stored. No bytes
are moved. Reads what names blocks: Mooncake's traces, Phaseplane's own, and generated:agentic or generated:multiturn.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from nodes.pool.policy import DEFAULT_POLICY, POLICIES, EvictionPolicy, make_policy
from nodes.pool.store import PoolStore
from transfer.errors import InvalidValue, PhaseplaneError
from transfer.traces.loading import Wanted, load_trace

DEFAULT_CAPACITIES = "1000,3000,10000,30000,50000"
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Prompt:
    """at_s: when it arrived. hashes: its blocks, in order."""

    at_s: float
    hashes: tuple[bytes, ...]


class HitRates(msgspec.Struct, frozen=True):
    """Shares of all blocks asked for. belady: of Belady's offline optimum, which knows the future."""

    capacity_blocks: int
    policy: str
    hit_rate: float
    lru: float
    belady: float
    ratio_to_lru: float
    ratio_to_belady: float
    num_prompts: int
    num_blocks: int


def read_prompts(source: str, wanted: Wanted | None = None) -> list[Prompt]:
    """Prompts of at least one block, in order of time, of a file or of generated traffic. Raises InvalidValue."""
    requests = load_trace(source, wanted or Wanted()).requests
    prompts = [
        Prompt(request.at_s, tuple(hashlib.sha256(b"%d" % number).digest() for number in request.blocks))
        for request in requests
        if request.blocks
    ]
    if not prompts:
        raise InvalidValue(f"the trace {source} names no blocks (hash_ids or blocks); give another with --trace FILE")
    return prompts


def measure(prompts: Sequence[Prompt], capacity: int, policy: str = DEFAULT_POLICY) -> HitRates:
    """Replays with the policy, LRU and the optimum. Raises InvalidValue for a capacity that a prompt does not fit."""
    longest = max(len(set(prompt.hashes)) for prompt in prompts)
    if capacity < longest:
        raise InvalidValue(f"a pool of {capacity} blocks cannot hold the longest prompt, of {longest}; give more")
    asked = sum(len(prompt.hashes) for prompt in prompts)
    distinct = len({h for prompt in prompts for h in prompt.hashes})
    held = min(capacity, distinct)  # more would change nothing but the memory that this takes
    lru = replay(prompts, held, make_policy(held, "lru")) / asked
    ours = lru if policy == "lru" else replay(prompts, held, make_policy(held, policy)) / asked
    best = belady(prompts, held) / asked
    return HitRates(
        capacity, policy, ours, lru, best, _ratio(ours, lru), _ratio(ours, best), len(prompts), asked
    )  # fmt: skip


def replay(prompts: Iterable[Prompt], capacity: int, policy: EvictionPolicy) -> int:
    """Blocks found, of all that the prompts asked the store for."""
    store = PoolStore(capacity, policy)
    for number, prompt in enumerate(prompts):
        lease = store.lease(number, prompt.hashes, prompt.at_s, prompt.at_s)
        store.reserve(number, prompt.hashes[len(lease.blocks) :], prompt.at_s, prompt.at_s)
        store.commit(number, prompt.at_s)
        store.unlease(number)
        store.take_changes()
    return store.num_hits


def belady(prompts: Sequence[Prompt], capacity: int) -> int:
    """Hits of the offline optimum: what is asked for again last, or never, goes first (Belady 1966); of blocks asked
    for again by one prompt the last in the chain goes first, so that what stays is leading."""
    next_use: dict[bytes, int] = {}
    uses: list[list[int]] = []
    for number in range(len(prompts) - 1, -1, -1):
        uses.append([next_use.get(h, NEVER) for h in prompts[number].hashes])
        next_use.update(dict.fromkeys(prompts[number].hashes, number))
    uses.reverse()
    held: dict[bytes, int] = {}
    order: list[tuple[int, int, bytes]] = []
    hits = 0
    for prompt, following in zip(prompts, uses, strict=True):
        leading = next((place for place, h in enumerate(prompt.hashes) if h not in held), len(prompt.hashes))
        hits += leading
        for place, (h, use) in enumerate(zip(prompt.hashes, following, strict=True)):
            held[h] = use
            heapq.heappush(order, (-use, -place, h))
        while len(held) > capacity:
            use, _, h = heapq.heappop(order)
            if held.get(h) == -use:
                del held[h]
    return hits


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="phaseplane bench prefix", description=__doc__)
    parser.add_argument("--trace", required=True, help="a file of requests with their blocks, or generated:agentic")
    parser.add_argument("--capacity", default=DEFAULT_CAPACITIES, help="blocks that the pool holds, comma separated")
    parser.add_argument("--policy", default=DEFAULT_POLICY, help=", ".join(POLICIES))
    parser.add_argument("--json", action="store_true", help="one JSON line for each capacity")
    options = parser.parse_args(argv)
    try:
        capacities = _capacities(options.capacity)
        make_policy(1, options.policy)
        prompts = read_prompts(options.trace)
        if not options.json:
            print(f"{len(prompts)} prompts of {sum(len(prompt.hashes) for prompt in prompts)} blocks; share found:")
            print(f"{'blocks held':>12} {options.policy:>8} {'LRU':>8} {'best':>8} {'of LRU':>8} {'of best':>8}")
        for capacity in capacities:
            rates = measure(prompts, capacity, options.policy)
            print(msgspec.json.encode(rates).decode() if options.json else _row(rates), flush=True)
    except PhaseplaneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; run the command again", file=sys.stderr)
        return 130
    return 0


def _capacities(text: str) -> list[int]:
    try:
        capacities = [int(part) for part in text.split(",")]
    except ValueError:
        capacities = []
    if not capacities or min(capacities) < 1:
        raise InvalidValue(f"--capacity takes whole numbers of blocks like {DEFAULT_CAPACITIES}, got {text!r}")
    return capacities


def _ratio(value: float, to: float) -> float:
    return value / to if to else 1.0


def _row(rates: HitRates) -> str:
    return (
        f"{rates.capacity_blocks:>12} {rates.hit_rate:>8.4f} {rates.lru:>8.4f} {rates.belady:>8.4f} "
        f"{rates.ratio_to_lru:>8.3f} {rates.ratio_to_belady:>8.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
