"""What runs on an instance, as the control plane sees it: tokens pass by it, so output is predicted from time."""

from __future__ import annotations

from controlplane.core.desk import Desk
from controlplane.core.instance import Instance
from controlplane.core.ledger import LegKind
from controlplane.core.lifecycle import RequestState
from controlplane.core.policies.protocol import Running


def running_on(desk: Desk, one: Instance) -> list[Running]:
    """Requests that the instance decodes or will decode, oldest placement first."""
    step_s = one.profile.decode_step_s(one.rows, one.context_tokens) * one.speed if one.rows else 0.0
    found = []
    for leg in desk.ledger.legs_at(one.id):
        request = desk.requests.get(leg.request_id)
        if request is None or leg.kind is not LegKind.DECODE or leg.closing:
            continue
        most, made = request.spec.sampling.max_tokens, request.num_output
        if request.first_token_s is not None and step_s > 0:
            since_s = max(request.first_token_s, request.placed_s)
            made += int((desk.now - since_s) / step_s)
        decoding = request.state is RequestState.DECODING and leg.generation == request.generation
        made = min(made, most)
        found.append(Running(request.request_id, request.num_prompt, made, most, decoding))
    return found
