"""The English of what a plan of several models says, by code; ui/words/zh-Hant/divide.toml has the Chinese."""

from __future__ import annotations

DIVISION: dict[str, str] = {
    # What is wanted of each model, as it is written.
    "want.before": "{word} stands before any model; write it like {example}",
    "want.unreadable": "{text} cannot be read ({reason}); write it like {example}",
    "want.twice": "{model} is wanted twice; name it once, with the sum of its rates",
    "want.many": "{num} models are wanted; a fleet is divided among {most} at most",
    "want.no_key": "{model} has no {name}; did you mean {nearest}=? It has {keys}",
    "want.one_value": "{model} needs one value for {name}=, got {got}",
    "want.no_pool": "{model} has pool={pool}, which is no KV pool; write it like pool=1xCPU:kv_pool",
    "want.no_rate": "nobody said how many requests a second {model} shall serve; write it like {example}",
    "want.rate": "{model} needs a rate above 0, in requests a second, got {got}",
    "want.of_one": "--{flag} is of a plan of one model; say it for each, like {example} in its --model",
    "want.of_one_only": "--{flag} is of a plan of one model; leave it out",
    "want.whose_pools": "--fleet {fleet} has KV pools, and each keeps the KV of one model: name them in the --model "
    "whose they are, like pool=1xCPU:kv_pool",
    # What the plan says.
    "divide.all": "every model gets its rate, for ${price} an hour: {models}",
    "divide.some": "there is too little for all: the worst served model gets {share} of its rate ({low} to {high}), "
    "for ${price} an hour: {models}",
    "divide.but": "{verdict}; {others}",
    "divide.equal": "an equal division serves {share} of {model}'s rate",
    "divide.equal_all": "an equal division does so too, for ${price}",
    "divide.now": "doing nothing serves {share} of {model}'s rate",
    "divide.now_all": "doing nothing does so too, for ${price}",
    "divide.now_over": "doing nothing serves {share} of {model}'s rate and costs ${price}, more than the budget",
    "divide.model": "{model} {served} of {wanted}/s by {xpyd}",
    "divide.of_model": "{model}: {text}",
    "divide.traffic": "nobody said what the traffic of {model} is like: {trace} decides; add trace= to its --model",
    "divide.nothing_now": "nobody said what serves each model now, so doing nothing is not judged; add now= to their "
    "--model",
    "divide.no_now": "nobody said what serves {model} now: it is taken as nothing",
    "divide.prices": "prices are indicative",
    "divide.short": "the trace of {model} has too few requests for {seconds} s at the rates simulated, so they come "
    "out high; give a longer one",
    "divide.no_fit": "the weights of {model} ({size} GB) leave no useful room for KV on any instance of {hardware}; "
    "add GPUs or a larger class to --fleet, or plan a smaller precision of it",
    "divide.hopeless": "no fleet of {hardware} that was looked at serves {target} of {model}'s requests within their "
    "objectives; loosen its slo=, lower --target, or add a faster class to --fleet",
    "divide.no_room": "{hardware} cannot serve every model at once: {needs}; add GPUs to --fleet, or leave a model out",
    "divide.no_money": "no division that serves every model costs at most ${budget} an hour: {needs}; raise --budget, "
    "or leave a model out",
    "divide.other_class": "{model} is served by {hardware} now, which --fleet has not; add it there, or mend now=",
    "divide.more_now": "{num} {hardware} serve the models now, and --fleet has {there}; add the others there, or mend "
    "now=",
    "divide.need": "{model} needs at least {fleet}",
}
