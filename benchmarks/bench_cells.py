"""What bench_policies.py compares on: workloads, fleets with their splits, objectives. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transfer.terms import Slo

MODEL = "llama-3.1-70b-fp8"
BLOCK_SIZE = 512
SEED_START_S = 400.0
"""Of a recorded trace, each seed takes another part."""


@dataclass(frozen=True)
class Workload:
    """source: with a rate; a file of --data when it is there. heavy: long prompts, so that prefill needs more."""

    source: str
    tight: Slo
    loose: Slo
    file: str = ""
    heavy: bool = False

    def trace(self, data: Path | None) -> tuple[str, bool]:
        """(source, whether it is a recording)."""
        recorded = data is not None and self.file and (data / self.file).is_file()
        return (str(data / self.file), True) if recorded and data is not None else (self.source, False)


@dataclass(frozen=True)
class Fleet:
    """split: for workloads as usual; heavy: for those of long prompts. The GPUs of both are the same."""

    split: str
    heavy: str
    mixed_classes: bool

    def text(self, workload: Workload, policy: str) -> str:
        """Every policy runs the same instances; colocated ones serve both phases each."""
        text = self.heavy if workload.heavy else self.split
        if policy != "colocated":
            return text
        return text.replace(":prefill", ":mixed").replace(":decode", ":mixed")


CHAT = (Slo(ttft_s=2.0, tpot_s=0.05), Slo(ttft_s=6.0, tpot_s=0.12))
LONG = (Slo(ttft_s=15.0, tpot_s=0.08), Slo(ttft_s=30.0, tpot_s=0.2))
WORKLOADS: dict[str, Workload] = {
    "mooncake": Workload("generated:multiturn", *LONG, "mooncake/conversation_trace.jsonl", heavy=True),
    "azure": Workload("generated:conversation", *CHAT, "azure/AzureLLMInferenceTrace_conv.csv"),
    "agentic": Workload("generated:agentic", *LONG, heavy=True),
    "bursty": Workload("generated:bursty?burst=6&period=40", *CHAT),
    "diurnal": Workload("generated:diurnal?period=120", *CHAT),
}
FLEETS: dict[str, Fleet] = {
    "8xH800": Fleet("2xH800@2:prefill,2xH800@2:decode", "3xH800@2:prefill,1xH800@2:decode", False),
    "16xH20": Fleet("5xH20@2:prefill,3xH20@2:decode", "6xH20@2:prefill,2xH20@2:decode", False),
    "8xH800+16xH20+4CPU": Fleet(*["4xH800@2:prefill,8xH20@2:decode,4xCPU:kv_pool"] * 2, True),
    "8xH800+8xL40S+8xH20": Fleet(*["4xH800@2:prefill,1xL40S@4:prefill,4xH20@2:decode,1xL40S@4:decode"] * 2, True),
}
OBJECTIVES = ("tight", "loose")
PEERS = (
    "round_robin", "random", "least_loaded", "cache_aware", "kv_cost", "conductor", "bin_packing", "lexicographic",
    "efficient_router", "past_future", "distserve", "splitwise", "colocated", "slo", "fastest",
)  # fmt: skip
OURS = "goodput"
AUTOPILOT = "goodput+autopilot"
"""Ours, and roles may change: it stands beside the others and is not compared with them."""
EARLY_REJECT = {"goodput": "objective", AUTOPILOT: "objective", "conductor": "objective"}
"""These turn requests away that cannot be good any more; the others' designs do not."""
LOADS = (1.0, 1.4)
"""Parts of a cell's knee: as much as the best policy can serve well, and more."""
KNEE_POLICIES = ("goodput", "conductor", "splitwise")
"""The knee of a cell is the highest that any of these reaches."""
