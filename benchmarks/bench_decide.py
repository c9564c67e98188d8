"""How long one placement decision takes: 256 instances, a directory of a million blocks, every policy; and its memory.

Times only what the scheduler does between an arrival and the reservation it sends: matching the prefix, the policy's
choice with its why, and the books.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from msgspec.structs import replace

from controlplane.core.config import CoreConfig
from controlplane.core.events import Arrived, Ended, FromNode, RequestSpec
from controlplane.core.policies.names import POLICY_NAMES
from controlplane.core.scheduler import SchedulerCore
from nodes.hardware import preset, with_gpus
from nodes.shapes import latency_profile, shape
from transfer.terms import KvLayout, ModelIdentity, Role, SamplingParams, Slo
from transfer.wire.messages import PROTOCOL_VERSION, CacheEvents, Heartbeat, Hello, LoadReport, Released

MODEL = ModelIdentity(name="m", revision="r", tokenizer="t", vocab_size=2, max_context=131072, eos_token_ids=())
BLOCK = 64
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype="uint8", rope="none")
PROMPT_BLOCKS = 48
ROOT = Path(__file__).resolve().parent.parent
GROWTH = """
import sys
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
runs, start = int(sys.argv[1]) // 48, rss()
"""
OURS = (
    "from controlplane.core.directory import Directory\n"
    "from transfer.wire.messages import CacheEvents\n"
    + GROWTH
    + """
held = Directory(runs * 48, 10.0)
for name in "ab":
    held.join(name, 1)
    for run in range(runs):
        stored = tuple((run * 48 + block).to_bytes(32, "big") for block in range(48))
        held.apply(name, CacheEvents(epoch=1, seq=run + 1, stored=stored), 0.0)
print((rss() - start) / (runs * 48))
"""
)
DYNAMO = (
    "import json\nfrom dynamo._core import RadixTree\n"
    + GROWTH
    + """
held = RadixTree()
for worker in (1, 2):
    for run in range(runs):
        blocks = [{"block_hash": run * 48 + b + 1, "tokens_hash": run * 48 + b + 1} for b in range(48)]
        event = {"event_id": run, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
        held.apply_event(worker, json.dumps(event).encode())
print((rss() - start) / (runs * 48))
"""
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--decisions", type=int, default=3000)
    parser.add_argument("--policies", nargs="*", default=list(POLICY_NAMES), metavar="NAME")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dynamo", type=Path, metavar="PYTHON", help="interpreter that has ai-dynamo-runtime")
    options = parser.parse_args(arguments)
    per_block = grown_bytes([sys.executable, "-c", OURS], options.blocks)
    print(f"directory: {per_block:.0f} bytes a block held by two instances")
    rows: list[dict[str, object]] = [{"name": "directory_bytes_per_block", "value": per_block}]
    if options.dynamo is not None:
        peer = grown_bytes([str(options.dynamo), "-c", DYNAMO], options.blocks)
        print(f"Dynamo's RadixTree: {peer:.0f} bytes a block held by two workers")
        rows.append({"name": "dynamo_bytes_per_block", "value": peer})
    for policy in options.policies:
        times = sorted(decisions(policy, options.instances, options.blocks, options.decisions))
        p50, p99 = statistics.median(times), times[int(len(times) * 0.99)]
        print(f"{policy:16} p50 {p50 * 1e6:6.0f} us, p99 {p99 * 1e6:6.0f} us", flush=True)
        rows.append({"name": f"decision_{policy}", "p50_us": p50 * 1e6, "p99_us": p99 * 1e6})
    if options.json is not None:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


def decisions(policy: str, num_instances: int, num_blocks: int, count: int) -> list[float]:
    """Seconds of each arrival's handling while a few hundred requests are under way."""
    config = replace(CoreConfig(), policy=policy, classes={"default": Slo(ttft_s=2.0, tpot_s=0.1)},
                     early_reject="never")  # fmt: skip
    core = SchedulerCore(config, 1, 0)
    prefills = fleet(core, num_instances)
    held = fill(core, prefills, num_blocks)
    times: list[float] = []
    live: list[str] = []
    for index in range(count):
        now = 1.0 + index * 0.002
        key = index * 37 % len(held)
        spec = RequestSpec(
            request_id=f"r{index}", model="m", tokens=bytes(4 * (PROMPT_BLOCKS * BLOCK + 1)),
            sampling=SamplingParams(max_tokens=200), traffic_class="default", arrived_s=now, arrived_at=now,
            timeout_s=600.0, hashes=held[key],
        )  # fmt: skip
        began = time.thread_time()
        core.handle(Arrived(request=spec), now)
        times.append(time.thread_time() - began)
        live.append(spec.request_id)
        if len(live) > 2 * num_instances:
            finish(core, live.pop(0), now)
    return times


def fleet(core: SchedulerCore, count: int) -> list[str]:
    """Half prefill on two classes of hardware, half decode."""
    llama, prefills = shape("llama-3.1-8b"), []
    for index in range(count):
        role = Role.PREFILL if index % 2 == 0 else Role.DECODE
        hardware = with_gpus(preset("H800" if index % 4 < 2 else "H20"), 1)
        name = f"{role.value[0]}{index // 2}"
        hello = Hello(
            protocol=PROTOCOL_VERSION, instance_id=name, epoch=1, role=role, model=MODEL, layout=LAYOUT,
            engine="emulated", hardware=hardware, latency=latency_profile(hardware, llama), num_blocks=8192,
            data_endpoint=f"inproc://{name}", host_id=name, token_budget=8192,
        )  # fmt: skip
        core.handle(FromNode(instance_id=name, message=hello), 0.0)
        load = LoadReport(num_blocks=8192, free_blocks=8192)
        core.handle(FromNode(instance_id=name, message=Heartbeat(epoch=1, state="ready", load=load)), 0.0)
        if role is Role.PREFILL:
            prefills.append(name)
    return prefills


def fill(core: SchedulerCore, prefills: list[str], num_blocks: int) -> list[tuple[bytes, ...]]:
    """Every prefill instance says what it holds; prompts are runs of these blocks, each held by two instances."""
    runs: list[tuple[bytes, ...]] = []
    stored: dict[str, list[bytes]] = {name: [] for name in prefills}
    for number in range(num_blocks // PROMPT_BLOCKS):
        run = tuple((number * PROMPT_BLOCKS + block).to_bytes(32, "big") for block in range(PROMPT_BLOCKS))
        runs.append(run)
        for name in (prefills[number % len(prefills)], prefills[(number * 7 + 1) % len(prefills)]):
            stored[name].extend(run)
    for name, hashes in stored.items():
        core.handle(FromNode(instance_id=name, message=CacheEvents(epoch=1, seq=1, stored=tuple(hashes))), 0.5)
    return runs


def finish(core: SchedulerCore, name: str, now: float) -> None:
    """The request is cancelled and its instances let go of it, so that load stays where it is."""
    request = core.request(name)
    if request is None:
        return
    instances = [one for one in (request.prefill, request.decode) if one is not None]
    core.handle(
        Ended(request_id=name, outcome="cancelled", finish_reason=None, output_tokens=0, ttft_s=0.1, tpot_s=None,
              e2e_s=0.1, max_itl_s=None, by_node=False), now,
    )  # fmt: skip
    for instance in instances:
        released = Released(request_id=name, generation=request.minted, num_blocks=0)
        core.handle(FromNode(instance_id=instance, message=released), now)


def grown_bytes(command: list[str], num_blocks: int) -> float:
    """By which a fresh process grows for each block that it is told two instances hold."""
    run = subprocess.run([*command, str(num_blocks)], capture_output=True, text=True, timeout=600, check=True, cwd=ROOT)
    return float(run.stdout.split()[-1])


if __name__ == "__main__":
    sys.exit(main())
