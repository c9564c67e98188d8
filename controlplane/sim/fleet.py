"""A fleet in words: "8xH800:prefill,8xH20@2:decode,2xCPU:kv_pool+4TB" as the instances it stands for."""

from __future__ import annotations

import re

from controlplane.sim.spec import NodeSpec
from nodes.hardware import preset, with_gpus
from nodes.shapes import kv_blocks, latency_profile, shape, weights_bytes
from transfer.errors import InvalidValue
from transfer.profile import HardwareProfile, ModelShape
from transfer.said import say
from transfer.terms import Role

USEFUL_KV_SHARE = 0.3
"""An instance whose number of GPUs is not given gets the fewest with which KV has this share of their memory."""
GPUS = (1, 2, 4, 8, 16)
POOL_MEMORY_SHARE = 0.8
"""The rest of a memory node is its system's."""
PREFILL_BUDGET, BUDGET = 8192, 2048
"""Most tokens of a step: of an instance that only prefills, and of one whose decodes wait for each step."""
MAX_INSTANCES = 4096
EXAMPLE = "8xH800:prefill,8xH20@4:decode,2xCPU:kv_pool+4TB"
_LETTERS = {Role.PREFILL: "p", Role.DECODE: "d", Role.MIXED: "m", Role.KV_POOL: "k"}
_PART = re.compile(
    r"(?P<count>\d+)x(?P<hardware>[\w-]+?)(?:@(?P<gpus>\d+))?:(?P<role>\w+)(?:\+(?P<ssd>\d+(?:\.\d+)?)TB)?"
)


def parse_fleet(text: str, model: str, block_size: int) -> tuple[NodeSpec, ...]:
    """Instances in the order written, their ids numbered by role: p0, d0, m0, k0. COUNTxCLASS[@GPUS]:ROLE[+SSD].

    GPUS: of each instance, tensor-parallel. ROLE: prefill, decode, mixed or kv_pool; +4TB gives a pool that much SSD.
    Raises InvalidValue with what is wrong and how to write it.
    """
    if block_size < 1:
        raise InvalidValue(say("fleet.block", got=block_size))
    shape_ = shape(model)
    numbers = dict.fromkeys(Role, 0)
    found: list[NodeSpec] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise InvalidValue(say("fleet.no_part", part=repr(part.strip()), example=EXAMPLE))
        role = _role(match["role"], part)
        count = int(match["count"])
        if not 1 <= count <= MAX_INSTANCES - len(found):
            raise InvalidValue(say("fleet.num", part=repr(part.strip()), most=MAX_INSTANCES))
        node = _instance(part.strip(), match, role, shape_, block_size)
        for _ in range(count):
            found.append(node(f"{_LETTERS[role]}{numbers[role]}"))
            numbers[role] += 1
    return tuple(found)


class _Kind:
    """Makes equal instances."""

    def __init__(self, spec: NodeSpec) -> None:
        self._fields = {name: getattr(spec, name) for name in spec.__struct_fields__}

    def __call__(self, name: str) -> NodeSpec:
        return NodeSpec(**{**self._fields, "id": name})


def _instance(part: str, match: re.Match[str], role: Role, model: ModelShape, block_size: int) -> _Kind:
    hardware = preset(match["hardware"])
    block_bytes = model.kv_token_bytes * block_size
    if role is Role.KV_POOL:
        if match["gpus"]:
            raise InvalidValue(say("fleet.pool_gpus", part=repr(part), gpus=match["gpus"]))
        num_blocks = int(hardware.memory_bytes * POOL_MEMORY_SHARE // block_bytes)
        if not num_blocks:
            raise InvalidValue(say("fleet.pool_memory", part=repr(part), size=f"{block_bytes / 1e9:.1f}"))
        ssd_blocks = int(float(match["ssd"] or 0) * 1e12 // block_bytes)
        return _Kind(
            NodeSpec(
                id="", role=role, hardware=hardware.name, num_gpus=0, price_per_hour=hardware.price_per_hour,
                latency=None, link_bytes_per_s=hardware.link_bytes_per_s, num_blocks=num_blocks, ssd_blocks=ssd_blocks,
            )
        )  # fmt: skip
    if match["ssd"]:
        raise InvalidValue(say("fleet.ssd", part=repr(part), ssd=match["ssd"]))
    gpus = int(match["gpus"]) if match["gpus"] else _fewest(part, hardware, model, block_size)
    whole = with_gpus(hardware, gpus)
    return _Kind(
        NodeSpec(
            id="", role=role, hardware=hardware.name, num_gpus=gpus, price_per_hour=whole.price_per_hour,
            latency=latency_profile(whole, model), link_bytes_per_s=whole.link_bytes_per_s,
            num_blocks=_blocks(part, whole, model, block_size),
            token_budget=PREFILL_BUDGET if role is Role.PREFILL else BUDGET,
        )
    )  # fmt: skip


def _fewest(part: str, hardware: HardwareProfile, model: ModelShape, block_size: int) -> int:
    """GPUs of one instance with room for weights and a useful amount of KV."""
    block_bytes = model.kv_token_bytes * block_size
    for gpus in GPUS:
        try:
            blocks = kv_blocks(with_gpus(hardware, gpus), model, block_size)
        except InvalidValue:
            continue
        if blocks * block_bytes >= USEFUL_KV_SHARE * gpus * hardware.memory_bytes:
            return gpus
    raise InvalidValue(say("fleet.no_room", part=repr(part), most=GPUS[-1], hardware=hardware.name))


def _blocks(part: str, hardware: HardwareProfile, model: ModelShape, block_size: int) -> int:
    try:
        return kv_blocks(hardware, model, block_size)
    except InvalidValue:
        raise InvalidValue(say(
            "fleet.weights", part=repr(part), size=f"{weights_bytes(model) / 1e9:.0f}", hardware=hardware.name,
            gpus=hardware.num_gpus, memory=f"{hardware.memory_bytes / 1e9:.0f}", more=2 * hardware.num_gpus,
        )) from None  # fmt: skip


def _role(name: str, part: str) -> Role:
    try:
        return Role(name)
    except ValueError:
        roles = ", ".join(role.value for role in Role)
        raise InvalidValue(say("fleet.role", part=repr(part.strip()), roles=roles, role=repr(name))) from None
