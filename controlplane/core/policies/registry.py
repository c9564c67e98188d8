"""Which policy a name stands for."""

from __future__ import annotations

from controlplane.core.policies.attainment import FASTEST, SLO
from controlplane.core.policies.baselines import COLOCATED, DISTSERVE, SPLITWISE
from controlplane.core.policies.dynamo import KV_COST
from controlplane.core.policies.goodput import GOODPUT
from controlplane.core.policies.lightllm import EFFICIENT_ROUTER, PAST_FUTURE
from controlplane.core.policies.llumnix import BIN_PACKING
from controlplane.core.policies.mooncake import CONDUCTOR
from controlplane.core.policies.narwhal import LEXICOGRAPHIC
from controlplane.core.policies.protocol import Policy
from controlplane.core.policies.sglang import CACHE_AWARE
from controlplane.core.policies.turns import LEAST_LOADED, RANDOM, ROUND_ROBIN

POLICIES: dict[str, Policy] = {
    "goodput": GOODPUT, "slo": SLO, "fastest": FASTEST, "round_robin": ROUND_ROBIN, "random": RANDOM,
    "least_loaded": LEAST_LOADED, "cache_aware": CACHE_AWARE, "kv_cost": KV_COST, "conductor": CONDUCTOR,
    "bin_packing": BIN_PACKING, "lexicographic": LEXICOGRAPHIC, "efficient_router": EFFICIENT_ROUTER,
    "past_future": PAST_FUTURE, "distserve": DISTSERVE, "splitwise": SPLITWISE, "colocated": COLOCATED,
}  # fmt: skip
"""By the names of names.py, which a test holds against these."""
