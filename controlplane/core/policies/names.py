"""The names of all placement policies, each with what it does in a line. Their code is found by registry.py."""

from __future__ import annotations

DEFAULT_POLICY = "goodput"
"""Where nearly all are late it lets the few longest prompts wait: `slo` and most others do not, and fewer are good."""

POLICY_NAMES: dict[str, str] = {
    "goodput": "most requests within their objectives: probability of being good, less the harm to others, less cost",
    "slo": "fewest predicted misses of objectives, then the least of them used up",
    "fastest": "earliest predicted first token",
    "round_robin": "everybody in turn",
    "random": "anybody, drawn from the seed",
    "least_loaded": "fewest requests in flight",
    "cache_aware": "longest cached prefix unless load is uneven, as in SGLang's router",
    "kv_cost": "fewest blocks to prefill and to hold, as in Dynamo's KV router",
    "conductor": "earliest predicted first token over cache and queue, early rejection, as in Mooncake",
    "bin_packing": "fullest decode within its pace, running requests migrate, as in Llumnix",
    "lexicographic": "within budget first, then the cheapest leg, as in Arrow and Narwhal",
    "efficient_router": "admits to decode by the highest memory it may ever need, as in LightLLM",
    "past_future": "admits to decode by the memory predicted from past output lengths, as in LightLLM",
    "distserve": "first come first served to the shortest prefill queue, least loaded decode, as in DistServe",
    "splitwise": "shortest queues, long ones overflow to the mixed pool, as in Splitwise",
    "colocated": "every instance prefills and decodes by itself in chunks, as vLLM does",
}
