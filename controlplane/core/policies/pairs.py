"""What policies of one score a phase share: the best prefill and the best decode instance, or one for both phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from controlplane.core.instance import Instance
from controlplane.core.placement import Candidate
from controlplane.core.policies.protocol import Situation
from transfer.said import Said, say

FEW = 16
"""More instances than anybody looks at."""
Key = float | tuple[float, ...]


@dataclass(slots=True, frozen=True)
class Score:
    """key: lower is better; ties go to whoever was picked longest ago. say: the figure behind it, for the why."""

    key: Callable[[Instance], Key]
    say: Callable[[Instance], Said]


def split(at: Situation, prefill: Score, decode: Score, whole: Score | None = None) -> list[Candidate]:
    """One instance for each phase, chosen apart. Where no pair can be, one instance does both, by `whole`."""
    group, estimator = at.group, at.estimator
    if not (group.prefills and group.decodes) or (at.config.colocate == "always" and group.mixed):
        return together(at, whole or decode, alone(at))
    if at.wanted.num_tokens < 2:
        return together(at, whole or decode, group.decodes)
    decodes = best(decode, estimator.open_decodes(group.decodes))
    prefills = best(prefill, estimator.open_prefills())
    return pairs(at, prefills, decodes, prefill, decode) if prefills and decodes else []


def pairs(
    at: Situation, prefills: Sequence[Instance], decodes: Sequence[Instance], prefill: Score, decode: Score
) -> list[Candidate]:
    """Candidates of instances ranked best first: the two best, then each of the others beside the best of its kind."""
    estimator, most = at.estimator, at.config.num_explained
    half = (most + 1) // 2
    options = [estimator.option(one) for one in prefills[:half]]
    found = []
    for index, (option, chosen) in enumerate(
        [(options[0], decodes[0])]
        + [(option, decodes[0]) for option in options[1:]]
        + [(options[0], one) for one in decodes[1 : most - len(options) + 1]]
    ):
        one = estimator.pair(option, chosen)
        if not index:
            one.reason = (say("score.pair", prefill=prefill.say(option.instance), decode=decode.say(chosen)),)
        elif option is not options[0]:
            own, best_one = prefill.say(option.instance), prefill.say(options[0].instance)
            one.reason = (say("score.prefill", own=own, best=best_one),)
        else:
            one.reason = (say("score.decode", own=decode.say(chosen), best=decode.say(decodes[0])),)
        found.append(one)
    return found


def together(at: Situation, score: Score, instances: Sequence[Instance]) -> list[Candidate]:
    """One instance for both phases."""
    ranked = best(score, at.estimator.open_decodes(instances))[: at.config.num_explained]
    found = [at.estimator.local(one) for one in ranked]
    for one in found:
        own = score.say(one.decode)
        one.reason = (own if one is found[0] else say("score.whole", own=own, best=score.say(ranked[0])),)
    return found


def alone(at: Situation) -> list[Instance]:
    """Instances that may do both phases where there is no pair: mixed ones, else decode if the settings let it."""
    group = at.group
    if group.mixed:
        return group.mixed
    return group.decodes if not group.prefills and at.config.without_prefill == "serve_on_decode" else []


def best(score: Score, instances: Sequence[Instance]) -> list[Instance]:
    """The few best, in order."""
    key = score.key
    rows = [(key(one), one.picked, one.id, one) for one in instances]
    return [row[-1] for row in (nsmallest(FEW, rows) if len(rows) > FEW else sorted(rows))]
