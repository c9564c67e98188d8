"""A burst that is beyond the budget, on the whole system in virtual time: refused at once with the price, or served by
decode instances that are idle."""

from __future__ import annotations

import asyncio
import re

from roles_harness import Options
from system_fleet import System, virtual

from controlplane.core.config import CoreConfig
from controlplane.gateway.errors import ApiError
from transfer.terms import Slo

BURST, BUDGET = 40, 5
PROMPT_TOKENS = 3000
REFUSED_S = 0.05


def prompt(number: int) -> list[int]:
    return [(number * 7 + place) % 200 + 1 for place in range(PROMPT_TOKENS)]


async def one_s() -> float:
    """TTFT of one such prompt by itself."""
    async with System("p0", "d0", options=Options(num_blocks=8192, token_budget=2048)) as system:
        await system.right("alone", prompt(0), 4)
    return system.record("alone").ttft_s or 0.0


async def burst(names: tuple[str, ...], colocate: str) -> tuple[System, dict[str, tuple[float, ApiError | None]]]:
    """Forty at once, with time for five on one instance; of each, how long its answer took and its refusal."""
    slo = Slo(ttft_s=(BUDGET + 0.5) * await one_s(), tpot_s=1.0)
    config = CoreConfig(classes={"default": slo}, policy="goodput", early_reject="objective", colocate=colocate)  # type: ignore[arg-type]
    answers: dict[str, tuple[float, ApiError | None]] = {}

    async def ask(system: System, number: int) -> None:
        now, refusal = asyncio.get_running_loop().time, None
        began_s = now()
        try:
            await system.right(f"r{number}", prompt(number), 4)
        except ApiError as error:
            refusal = error
        answers[f"r{number}"] = now() - began_s, refusal

    async with System(*names, config=config, options=Options(num_blocks=8192, token_budget=2048)) as system:
        await asyncio.gather(*(ask(system, number) for number in range(BURST)))
    system.check_replay()
    return system, answers


def test_what_is_beyond_the_budget_is_refused_at_once_with_the_price() -> None:
    async def scenario() -> None:
        alone_s = await one_s()
        system, answers = await burst(("p0", "d0"), "never")
        refused = {name: found for name, found in answers.items() if found[1] is not None}
        served = [record for record in system.records if record.outcome == "ok"]
        assert BUDGET <= len(served) <= BUDGET + 2
        assert len(served) + len(refused) == BURST
        assert sum(record.good is True for record in served) >= BUDGET - 1
        in_doubt = [took_s for took_s, _ in refused.values() if took_s > REFUSED_S]
        assert len(in_doubt) <= 2, "only those whose chance lay within the prediction's error may wait for it"
        for _, error in refused.values():
            assert error is not None
            assert (error.status, error.retry_after_s is not None) == (429, True)
            price = re.search(r"first token is predicted in ([\d.]+) s.*; try again in (\d+) s$", str(error))
            assert price is not None, error
            assert float(price[1]) > BUDGET * alone_s
            assert float(price[2]) == error.retry_after_s

    virtual(scenario)


def test_idle_decode_instances_serve_what_they_can_of_it() -> None:
    async def scenario() -> None:
        system, answers = await burst(("p0", *(f"d{number}" for number in range(8))), "auto")
        assert [error for _, error in answers.values() if error is not None] == []
        assert [record.good for record in system.records] == [True] * BURST
        at_decode = [record for record in system.records if record.prefill is None]
        assert len(at_decode) >= BURST - BUDGET - 2
        assert len({record.decode for record in at_decode}) == 8

    virtual(scenario)
