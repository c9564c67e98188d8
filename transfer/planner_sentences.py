"""The English of what the offline planner says, by code; ui/words/zh-Hant/planner.toml has the Chinese."""

from __future__ import annotations

PLANNER: dict[str, str] = {
    "and_so": "{first}; {then}",
    "planner.disaggregate": "Disaggregate: {xpyd} ({fleet}) {serves}; {gain}",
    "planner.colocate": "Do not disaggregate: {xpyd} ({fleet}) {serves}; {gain}",
    "planner.serves": "serves {rate} requests a second ({low} to {high}) with {target} within objectives, {per_gpu} a "
    "GPU, for ${price} an hour",
    "planner.other_colocated": "the best colocated fleet",
    "planner.other_split": "the best split",
    "planner.other_fails": "{other} does not meet the wish",
    "planner.more": "{margin} more than {other}",
    "planner.cheaper": "{margin} cheaper than {other}",
    "planner.better": "{other} is better by only {margin}",
    "planner.worse": "{other} is worse by {margin}",
    "planner.busiest": "{phase} on {where} is busiest ({use}), most of it {term}",
    "planner.lift_prefill": "more prefill of {where} would lift the bound first",
    "planner.lift_time": "more time of {where} would lift the bound first",
    "planner.free": "nothing holds it back at this rate",
    "terms.compute": "compute",
    "terms.weight": "weight",
    "terms.attention": "attention",
    "terms.kv": "kv",
    "terms.communication": "communication",
    "terms.constant": "constant",
    "terms.nothing": "nothing",
    # What a fleet of the comparison stands for, and what is special about it.
    "planner.split": "split {num}",
    "planner.colocated": "colocated",
    "planner.nothing": "doing nothing",
    "planner.best_per_dollar": "estimated best per dollar",
    "planner.best_per_gpu": "estimated best per GPU",
    "planner.for_rate": "for {rate}/s",
    "planner.algorithm": "{name}",
    "planner.is_mixed": "doing nothing is every instance in both phases",
    "planner.expects": "it expects {rate}/s of itself; static policy",
    "planner.over": "over the budget, which it does not know",
    # What to beware of.
    "planner.no_trace": "nobody said what the traffic is like: {trace} decides; give yours with --trace",
    "planner.no_current": "nobody said what there is now: doing nothing is taken as all instances mixed; say with "
    "--current",
    "planner.short": "the trace has too few requests for {seconds} s at the rates simulated, so they come out high; "
    "give a longer one",
    "trace.objectives": "objectives are the defaults: TTFT {ttft} s, TPOT {tpot} s; set them with --slo",
    "trace.failed": "{num} of {total} requests of the trace had failed and are left out",
    "trace.guessed": "{num} of {total} requests did not end well when recorded; they want their class's median",
    # Why there is no plan.
    "planner.none_serves": "no instance of this hardware can serve {target} of the requests within their objectives, "
    "even one at a time; loosen --slo, lower --target, or add a faster class to --fleet",
    "planner.no_money": "no fleet that can serve costs at most ${budget} an hour; raise --budget",
    "planner.too_much": "no fleet of this inventory that was simulated serves {rate} requests a second; the best, "
    "{fleet}, serves {serves}; lower --rate, raise --budget or add to --fleet",
    "planner.hopeless": "no fleet reaches {target} attainment at any rate; loosen --slo or lower --target",
    "planner.no_part": "{part} is no part of an inventory; write how many GPUs of which class, like {example}",
    "planner.num_gpus": "{text} has {num} GPUs; a plan needs from 1 to {most}, like {example}",
    "planner.above": "--{flag} must be above 0, got {got}",
    "planner.target": "--target must be between 0 and 1, like 0.9, got {got}",
    "planner.scipy": "planning needs scipy, which is not installed; install it with `pip install 'phaseplane[plan]'`",
    "planner.plot": "cannot write the plot {path} ({reason}); give another file with --png",
    "planner.blocks": "a trace whose blocks are {num} tokens long cannot be bounded with KV blocks of {size}; give a "
    "block size that divides {num}",
    # A fleet, its hardware, a model and objectives as they are written.
    "fleet.block": "a KV block holds at least one token, got {got}",
    "fleet.no_part": "{part} is no part of a fleet; write COUNTxCLASS[@GPUS]:ROLE like {example}",
    "fleet.num": "{part}: a fleet has from 1 to {most} instances",
    "fleet.role": "{part}: an instance is {roles}, not {role}",
    "fleet.pool_gpus": "{part}: a kv_pool has no GPUs; leave @{gpus} out",
    "fleet.pool_memory": "{part}: not one KV block of {size} GB fits into its memory",
    "fleet.ssd": "{part}: only a kv_pool keeps KV on SSD; leave +{ssd}TB out",
    "fleet.no_room": "{part}: the model leaves no useful room for KV on up to {most} {hardware}; take a class with "
    "more memory, or say how many GPUs an instance has, like @32",
    "fleet.weights": "{part}: {size} GB of weights leave no room for KV in {gpus} x {hardware} ({memory} GB each); "
    "give each instance more GPUs, like @{more}",
    "hardware.unknown": "there is no hardware class {name}; did you mean {nearest}? Known: {known}",
    "hardware.gpus": "an instance needs at least one GPU, got {got}",
    "model.unknown": "the shape of model {name} is not known; did you mean {nearest}? Or give a directory with "
    "config.json",
    "objective.unreadable": "{text} is not an objective; write it like --slo ttft:2,tpot:0.2 (seconds)",
    "objective.both": "{text} needs both ttft and tpot; write it like --slo ttft:2,tpot:0.2 (seconds)",
}
