"""Fleets to choose from: what hardware there is, the shapes instances can take on it, and fleets made of those."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from controlplane.sim.fleet import BUDGET, PREFILL_BUDGET, USEFUL_KV_SHARE, parse_fleet
from controlplane.sim.spec import NodeSpec
from nodes.hardware import preset, with_gpus
from nodes.shapes import kv_blocks, latency_profile
from transfer.errors import InvalidValue
from transfer.profile import ModelShape
from transfer.said import say
from transfer.terms import Role, Struct

TENSOR, STAGES = (1, 2, 4, 8), (1, 2, 4)
MAX_GPUS = 1024
EXAMPLE = "8xH800,16xH20,4xCPU:kv_pool"
_PART = re.compile(r"(?P<count>\d+)x(?P<hardware>[\w-]+)")
_LETTERS = {Role.PREFILL: "p", Role.DECODE: "d", Role.MIXED: "m"}


class Stock(Struct, frozen=True):
    """GPUs of one class that there are, or may be bought; price_per_hour of one."""

    hardware: str
    num_gpus: int
    price_per_hour: float


class Inventory(Struct, frozen=True):
    stocks: tuple[Stock, ...]
    pools: tuple[NodeSpec, ...] = ()

    def __str__(self) -> str:
        """Its GPUs, as parse_inventory takes them."""
        return ",".join(f"{one.num_gpus}x{one.hardware}" for one in self.stocks)


class Shape(Struct, frozen=True):
    """How one instance uses its GPUs: tp of them in each of pp stages."""

    hardware: str
    tp: int
    pp: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"{self.hardware}@{self.num_gpus}" + (f" (tp{self.tp} pp{self.pp})" if self.pp > 1 else "")


class Part(Struct, frozen=True):
    shape: Shape
    role: Role
    count: int


class Fleet(Struct, frozen=True, dict=True):
    """pools: of the inventory, the same in every fleet."""

    parts: tuple[Part, ...]
    pools: tuple[NodeSpec, ...] = ()

    @property
    def num_gpus(self) -> int:
        return sum(part.count * part.shape.num_gpus for part in self.parts)

    @cached_property
    def price_per_hour(self) -> float:
        gpus = sum(part.count * part.shape.num_gpus * preset(part.shape.hardware).price_per_hour for part in self.parts)
        return gpus + sum(pool.price_per_hour for pool in self.pools)

    def count(self, role: Role) -> int:
        return sum(part.count for part in self.parts if part.role is role)

    @property
    def xpyd(self) -> str:
        """As `phaseplane rebalance` takes it."""
        letters = {Role.PREFILL: "P", Role.DECODE: "D", Role.MIXED: "M"}
        return "".join(f"{self.count(role)}{letter}" for role, letter in letters.items() if self.count(role))

    @property
    def is_colocated(self) -> bool:
        return all(part.role is Role.MIXED for part in self.parts)

    def __str__(self) -> str:
        """As `phaseplane simulate --fleet` takes it, but for pipelines."""
        names = [f"{part.count}x{part.shape}:{part.role}" for part in self.parts]
        pools: dict[str, int] = {}
        for pool in self.pools:
            pools[pool.hardware] = pools.get(pool.hardware, 0) + 1
        return ",".join([*names, *(f"{count}x{hardware}:kv_pool" for hardware, count in pools.items())])


def parse_inventory(text: str, model_name: str, block_size: int) -> Inventory:
    """COUNTxCLASS of GPUs and COUNTxCLASS:kv_pool, joined by commas. Raises InvalidValue."""
    stocks: dict[str, int] = {}
    pools: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if ":kv_pool" in part:
            pools.append(part)
            continue
        match = _PART.fullmatch(part)
        if match is None:
            raise InvalidValue(say("planner.no_part", part=repr(part), example=EXAMPLE))
        name, count = preset(match["hardware"]).name, int(match["count"])
        stocks[name] = stocks.get(name, 0) + count
    if not stocks or not 1 <= sum(stocks.values()) <= MAX_GPUS:
        num = sum(stocks.values())
        raise InvalidValue(say("planner.num_gpus", text=repr(text), num=num, most=MAX_GPUS, example=EXAMPLE))
    nodes = parse_fleet(",".join(pools), model_name, block_size) if pools else ()
    found = tuple(Stock(name, count, preset(name).price_per_hour) for name, count in stocks.items())
    return Inventory(found, nodes)


def parse_current(text: str, model_name: str, block_size: int, pools: tuple[NodeSpec, ...]) -> Fleet:
    """A fleet as `phaseplane simulate` takes it; its pools are those of the inventory. Raises InvalidValue."""
    parts: dict[tuple[Shape, Role], int] = {}
    for node in parse_fleet(text, model_name, block_size):
        if node.latency is not None:
            key = (Shape(node.hardware, node.latency.tp, node.latency.pp), node.role)
            parts[key] = parts.get(key, 0) + 1
    return Fleet(tuple(Part(shape, role, count) for (shape, role), count in parts.items()), pools)


def shapes(stock: Stock, model: ModelShape, block_size: int) -> list[Shape]:
    """Those whose GPUs there are and hold the weights and a useful amount of KV. Stages and the GPUs of a stage stay
    within one scale-up domain."""
    domain = min(stock.num_gpus, preset(stock.hardware).scale_up_size)
    found = []
    for tp in TENSOR:
        for pp in STAGES:
            if tp * pp > domain or model.num_layers % pp or (tp > 1 and model.num_heads % tp):
                continue
            if _useful_blocks(Shape(stock.hardware, tp, pp), model, block_size):
                found.append(Shape(stock.hardware, tp, pp))
    return found


def build(fleet: Fleet, model: ModelShape, block_size: int, *, lanes: bool = True) -> tuple[NodeSpec, ...]:
    """The instances of a fleet. lanes: a prefill instance of pp stages stands as pp nodes, each with the time of a
    whole pass and its share of GPUs and KV: as many prompts are on their way through it. (Steps of decodes alone are
    split over the stages by the profile itself.)"""
    numbers = dict.fromkeys(_LETTERS, 0)
    found: list[NodeSpec] = []
    for part in fleet.parts:
        for _ in range(part.count):
            name = f"{_LETTERS[part.role]}{numbers[part.role]}"
            numbers[part.role] += 1
            found += _instance(name, part.shape, part.role, model, block_size, lanes)
    return (*found, *fleet.pools)


def _instance(
    name: str, shape: Shape, role: Role, model: ModelShape, block_size: int, lanes: bool
) -> Sequence[NodeSpec]:  # fmt: skip
    whole = with_gpus(preset(shape.hardware), shape.num_gpus)
    latency = latency_profile(whole, model, tp=shape.tp, pp=shape.pp)
    count = shape.pp if lanes and role is Role.PREFILL else 1
    blocks = kv_blocks(whole, model, block_size, pp=shape.pp) // count
    return [
        NodeSpec(
            id=name if count == 1 else f"{name}.{lane}", role=role, hardware=shape.hardware,
            num_gpus=shape.num_gpus // count, price_per_hour=whole.price_per_hour / count, latency=latency,
            link_bytes_per_s=whole.link_bytes_per_s / count, num_blocks=blocks,
            token_budget=PREFILL_BUDGET if role is Role.PREFILL else BUDGET,
        )
        for lane in range(count)
    ]  # fmt: skip


def _useful_blocks(shape: Shape, model: ModelShape, block_size: int) -> bool:
    whole = with_gpus(preset(shape.hardware), shape.num_gpus)
    try:
        blocks = kv_blocks(whole, model, block_size, pp=shape.pp)
    except InvalidValue:
        return False
    return blocks * block_size * model.kv_token_bytes >= USEFUL_KV_SHARE * shape.num_gpus * whole.memory_bytes / 2
