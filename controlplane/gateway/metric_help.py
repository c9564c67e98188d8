"""What every name on /metrics means, as its HELP line says it. docs/metrics.md lists the same names."""

from __future__ import annotations

HELP: dict[str, str] = {
    # Requests: one choice of one call each.
    "phaseplane_requests_total":
        "Requests that ended, by traffic class, model and outcome (ok, cancelled, rejected, timed_out, error).",
    "phaseplane_good_requests_total":
        "Requests that finished normally within every objective of their traffic class.",
    "phaseplane_ttft_seconds":
        "Time to first token: from arrival at the gateway to the first token in the client's socket.",
    "phaseplane_tpot_seconds":
        "Time per output token: mean gap between the tokens of one request, the first not counted.",
    "phaseplane_e2e_seconds": "From arrival at the gateway to the end of a request that finished normally.",
    "phaseplane_itl_seconds": "Inter-token latency: every single gap between two output tokens of a request.",
    "phaseplane_stage_seconds_total": "Seconds that requests spent on the way to their first token, by stage.",
    "phaseplane_requests_in_flight": "Requests that arrived and have not ended.",
    "phaseplane_requests_waiting_for_a_place": "Requests that no instance has been asked to serve yet.",
    "phaseplane_requests_waiting_past_objective":
        "Requests that wait for a place and are already past an objective of their class.",
    "phaseplane_requests_doomed": "Requests in flight that are already past an objective of their class.",
    "phaseplane_requests_suspected": "Requests in flight that run alone because engines failed while they ran.",
    "phaseplane_arrivals_total": "Requests that reached the scheduler.",
    "phaseplane_placements_remote_total":
        "Placements with prefill on one instance and decode on another, resumed requests included.",
    "phaseplane_placements_local_total":
        "Placements with prefill and decode on one instance, resumed requests included.",
    "phaseplane_reservations_refused_total": "Times an instance had no KV blocks for a request after all.",
    "phaseplane_resumes_total":
        "Times that requests which have ended were taken up again after their instance was lost.",
    "phaseplane_migrations_total": "Times that requests which have ended moved to another instance while they ran.",
    "phaseplane_replaced_total": "Times that requests which have ended were placed anew by a drain.",
    "phaseplane_migrations_failed_total": "Migrations that were given up; the request stayed where it ran.",
    "phaseplane_engine_failures_total": "Times a node said that its engine failed.",
    "phaseplane_poisonous_requests_total": "Requests ended because engines failed whenever they ran.",
    "phaseplane_instances_lost_total": "Times an instance left, was restarted or was heard of no more.",
    # Goodput.
    "phaseplane_goodput_requests_per_second": "Good requests per second over the last 60 s, by completion time.",
    "phaseplane_goodput_requests_per_second_per_gpu":
        "Good requests of the last 60 s per GPU second of the fleet in that time.",
    "phaseplane_good_tokens_per_second": "Output tokens of good requests per second over the last 60 s.",
    "phaseplane_throughput_requests_per_second":
        "Requests that finished normally, good or not, per second over the last 60 s.",
    "phaseplane_slo_attainment":
        "Share of good requests among those that count, from 0 to 1, since the control plane started.",
    "phaseplane_cost_per_good_request_dollars":
        "What the fleet cost over the last 60 s per good request in them; left out while there is none.",
    # The fleet.
    "phaseplane_instances": "Instances by role and state.",
    "phaseplane_fleet_version":
        "Number of the fleet's present shape: bumped by every change of membership, role or plan.",
    "phaseplane_uptime_seconds": "Time since the control plane started.",
    "phaseplane_queued_prefill_tokens": "Prompt tokens that wait for compute on an instance.",
    "phaseplane_step_seconds": "Mean duration of an instance's recent engine steps.",
    "phaseplane_preemptions_total":
        "Sequences an instance took out of its batch for want of KV blocks, and computed again.",
    # KV.
    "phaseplane_kv_blocks": "KV blocks an instance has.",
    "phaseplane_kv_blocks_free": "KV blocks of an instance that can be taken now, those with reusable KV included.",
    "phaseplane_kv_blocks_cached": "KV blocks of an instance that nobody holds and that carry reusable KV.",
    "phaseplane_orphaned_kv_blocks": "KV blocks held for requests that the control plane does not know; 0 at rest.",
    "phaseplane_handoff_legs":
        "Parts of placements that instances hold blocks for, prefill and decode counted apart.",
    "phaseplane_handoff_bytes_total": "KV bytes that prefill instances sent to decode instances.",
    "phaseplane_directory_blocks": "KV blocks whose place in the fleet the directory knows.",
    "phaseplane_prefill_tokens_computed_total": "Prompt tokens that prefill instances computed.",
    "phaseplane_prefill_tokens_fetched_total": "Prompt tokens whose KV was fetched from pools, on whatever instance.",
    "phaseplane_kv_blocks_ssd": "KV blocks readable from the SSD tier of a pool.",
    "phaseplane_prefix_lookup_tokens_total": "Prompt tokens that were looked up in KV, of first placements.",
    "phaseplane_prefix_hit_tokens_total": "Prompt tokens whose KV was found, by where (device, pool_dram, pool_ssd).",
    "phaseplane_prefix_useful_tokens_total": "Fetched prompt tokens that came sooner than they could be computed.",
    "phaseplane_prefix_replicated_blocks_total": "KV blocks of popular prefixes that were copied to another pool.",
    "phaseplane_prefix_copies_ordered_total": "Copies of popular prefixes that pools were asked to make.",
    "phaseplane_prefix_copies_failed_total": "Copies of popular prefixes that a pool could not make.",
    # The control plane itself.
    "phaseplane_gateway_streams": "Requests the gateway has open towards clients.",
    "phaseplane_gateway_late_items_total": "Tokens dropped because they came from an older placement or twice.",
    "phaseplane_process_cpu_seconds_total": "CPU time of the control plane's process.",
    "phaseplane_process_resident_memory_peak_bytes": "Most memory the control plane's process has had resident.",
    "phaseplane_process_start_time_seconds": "Unix time at which the control plane's process started serving.",
    # The autopilot.
    "phaseplane_autopilot_mode": "Mode of the autopilot: 0 off, 1 advise, 2 auto.",
    "phaseplane_autopilot_looks_total": "Times the autopilot looked for role switches that would win goodput.",
    "phaseplane_autopilot_proposals_total": "Times the autopilot began to propose a move, or another one.",
    "phaseplane_autopilot_moves_total": "Moves that the autopilot made.",
    # vLLM's names.
    "vllm:num_requests_running": "Sequences in an instance's batch.",
    "vllm:num_requests_waiting": "Sequences that wait for an instance's batch.",
    "vllm:kv_cache_usage_perc": "Share of an instance's KV blocks in use, from 0 to 1.",
    "vllm:prefix_cache_queries_total": "Prompt tokens that were looked up in KV, of requests that had a first token.",
    "vllm:prefix_cache_hits_total": "Prompt tokens served from KV that was there already.",
    "vllm:prompt_tokens_total": "Prompt tokens of requests that had a first token.",
    "vllm:generation_tokens_total": "Output tokens of requests that ended.",
    "vllm:request_success_total": "Requests that ended, by finish reason (stop, length, abort, error).",
    "vllm:time_to_first_token_seconds": "As phaseplane_ttft_seconds, of all classes.",
    "vllm:inter_token_latency_seconds": "As phaseplane_itl_seconds.",
    "vllm:request_time_per_output_token_seconds": "As phaseplane_tpot_seconds, of all classes.",
    "vllm:e2e_request_latency_seconds": "As phaseplane_e2e_seconds, of all classes.",
}  # fmt: skip


def help_of(name: str) -> str:
    """The sentence, or the name in words for one that is not listed."""
    return HELP.get(name) or name.partition("_")[2].replace("_", " ")
