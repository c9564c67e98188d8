"""A fleet for several models: what is asked, what is simulated, who gets what, what it says and what to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from controlplane.config import load_config
from controlplane.planner import division as planner_division
from controlplane.planner.apply import apply_commands, apply_config
from controlplane.planner.capacity import estimate
from controlplane.planner.cli import make_parser
from controlplane.planner.commands import commands
from controlplane.planner.division import make_division
from controlplane.planner.division_report import DivisionPlan
from controlplane.planner.fleets import Fleet, Part, Shape, parse_current
from controlplane.planner.judge import Judge, Judged
from controlplane.planner.prepare import Prepared, prepare
from controlplane.planner.search import frontier
from controlplane.planner.side import Asked, gpus_of
from controlplane.planner.wants import Want, is_several, parse_wants
from controlplane.sim.spec import NodeSpec, SimResult
from nodes.options import parse_options
from transfer.errors import InvalidValue
from transfer.said import render
from transfer.terms import Role, Slo
from ui.words import words

TRACE = "generated:conversation?num=100"
SMALL, LARGE = "llama-3.1-8b", "llama-3-70b"
SLO = "slo=ttft=2,tpot=0.05"


class Formula(Judge):
    """In a judge's place: a fleet serves so much of what closed forms estimate, so that choices need no runs."""

    def __init__(self, prepared: Prepared, want: Want, factor: float) -> None:
        super().__init__(prepared.trace, prepared.config, prepared.workload.model, 0.9, 100, None, want.rate, True)
        self.workload, self.rate, self.factor = prepared.workload, want.rate, factor
        self.asked: list[str] = []

    def judge(self, fleet: Fleet, guess: float, policy: str | None = None) -> Judged:
        self.asked.append(str(fleet))
        rate = min(self.rate, self.factor * estimate(fleet, self.workload))
        return Judged(fleet, rate, rate, None, policy or "goodput")


def asked(fleet: str, text: str, factor: float = 0.8) -> Asked:
    flags = make_parser().parse_args(["--fleet", fleet, "--model", text, "--num", "60"])
    want = parse_wants([text])[0]
    prepared = prepare(flags, want.model, ",".join((fleet, *want.pools)), want.slos, TRACE, None)
    now = None if want.now is None else parse_current(want.now, want.model, 512, prepared.inventory.pools)
    return Asked(want, prepared, Formula(prepared, want, factor), now)


def division(fleet: str, *texts: str, budget: float | None = None, factor: float = 0.8) -> DivisionPlan:
    return make_division([asked(fleet, text, factor) for text in texts], budget, 2, [], [])


def shares(plan: DivisionPlan) -> list[float]:
    return [one.share for one in plan.chosen.models]


# --- what is asked ------------------------------------------------------------------------------------------------


def test_a_word_without_a_value_begins_a_model() -> None:
    apart = [f"{LARGE} rate=3 {SLO} slo=batch=ttft:30,tpot:1 trace='my file.jsonl' format=azure", f"{SMALL} rate=.5"]
    found = parse_wants(apart)
    assert found[0] == Want(
        LARGE, 3.0, ("ttft=2,tpot=0.05", "batch=ttft:30,tpot:1"), trace="my file.jsonl", format="azure"
    )
    assert found[1] == Want(SMALL, 0.5)
    assert parse_wants([" ".join(apart)]) == found, "as a variable gives them"
    assert is_several(apart)
    assert is_several([f"{SMALL} rate=2"])
    assert not is_several([SMALL])


def test_a_directory_is_one_model_whatever_its_name_is(tmp_path: Path) -> None:
    directory = tmp_path / "it's my model"
    with pytest.raises(InvalidValue, match="cannot be read"):
        is_several([str(directory)])
    directory.mkdir()
    assert not is_several([str(directory)])
    assert is_several([f"{SMALL} rate=3 trace={'x' * 300}"]), "too long for the name of a file"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([SMALL, LARGE], "nobody said how many requests a second llama-3.1-8b shall serve"),
        (["rate=3", SMALL], "stands before any model"),
        ([f"{SMALL} rat=3"], "did you mean rate=?"),
        ([f"{SMALL} rate=fast"], "needs a rate above 0"),
        ([f"{SMALL} rate=-1"], "needs a rate above 0"),
        ([f"{SMALL} rate=inf"], "needs a rate above 0"),
        ([f"{SMALL} rate=1 rate=2"], "one value for rate="),
        ([f"{SMALL} rate=1 trace="], "one value for trace="),
        ([f"{SMALL} rate=1 trace='a"], "cannot be read"),
        ([f"{SMALL} rate=1", f"{SMALL} rate=2"], "wanted twice"),
        ([f"m{place} rate=1" for place in range(17)], "among 16 at most"),
    ],
)
def test_what_is_not_asked_rightly_is_said_in_a_sentence(texts: list[str], said: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(said)):
        parse_wants(texts)


# --- what each could do -------------------------------------------------------------------------------------------


def test_the_frontier_has_the_best_of_every_number_of_gpus() -> None:
    prepared = asked("3xH800,4xH20", f"{SMALL} rate=500 {SLO}").prepared
    inventory, workload = prepared.inventory, prepared.workload
    found = frontier(inventory, workload, 1e9)
    for kind in (True, False):
        points = {
            tuple(gpus_of(one.fleet)[name] for name in ("H800", "H20")): one.estimate
            for one in found if one.fleet.is_colocated is kind
        }  # fmt: skip
        assert len(points) == sum(one.fleet.is_colocated is kind for one in found), "one fleet for each"
        for gpus, rate in points.items():
            fewer = [
                other
                for place, other in points.items()
                if place != gpus and place[0] <= gpus[0] and place[1] <= gpus[1]
            ]
            assert all(other < rate for other in fewer)
    together = {gpus_of(one.fleet)["H800"] for one in found if one.fleet.is_colocated}
    assert together == {0, 1, 2, 3}
    whole = max(one.estimate for one in found)
    assert max(one.estimate for one in frontier(inventory, workload, whole / 8)) < whole / 2, (
        "no look at fleets far beyond what is enough"
    )


class Limited(Judge):
    """In a judge's place: every fleet serves up to `limit` requests a second."""

    def __init__(self, prepared: Prepared, wanted: float, limit: float) -> None:
        super().__init__(prepared.trace, prepared.config, prepared.workload.model, 0.9, 100, None, wanted, True)
        self.limit = limit
        self.rates: list[float] = []

    def run(
        self, nodes: Sequence[NodeSpec], rate: float, policy: str, what: str, trace: object = None
    ) -> SimResult:  # fmt: skip
        self.rates.append(rate)
        return SimResult((), 0.0, 1.0, 1.0, 1.0, 100 if rate <= self.limit else 0, 100, 0, 0, 0)


def test_nothing_beyond_the_wanted_rate_is_simulated() -> None:
    prepared = asked("1xH800", f"{SMALL} rate=5 {SLO}").prepared
    fleet = Fleet((Part(Shape("H800", 1), Role.MIXED, 1),))
    judge = Limited(prepared, 5.0, 8.0)
    found = judge.judge(fleet, 2.0)
    assert (found.max_rate, found.next_rate, judge.rates) == (5.0, 5.0, [5.0])
    judge = Limited(prepared, 5.0, 4.95)
    found = judge.judge(fleet, 4.9)
    assert (found.max_rate, found.next_rate) == (4.9, 5.0)
    assert judge.rates == [5.0, 4.9]


# --- who gets what ------------------------------------------------------------------------------------------------


def test_equal_models_that_want_equally_get_equal_halves() -> None:
    plan = division("4xH800", f"{SMALL} rate=1000 {SLO}", f"{SMALL}-fp8 rate=1 {SLO}")
    assert shares(plan)[1] == 1.0
    assert plan.chosen.models[0].gpus == {"H800": 3}, "one GPU is all that the other can use"
    plan = division("4xH800", f"{SMALL} rate=1000 {SLO}", f"llama-3-8b rate=1000 {SLO}")
    assert [one.gpus for one in plan.chosen.models] == [{"H800": 2}, {"H800": 2}]
    assert plan.chosen.least_share == plan.alternatives[0].least_share
    assert plan.alternatives[0].kind == "equal"


def test_only_simulated_fleets_are_reported_and_none_is_worse_than_an_equal_division() -> None:
    pair = [asked("8xH800,8xH20", f"{LARGE} rate=20 {SLO}", 0.3), asked("8xH800,8xH20", f"{SMALL} rate=60 {SLO}", 0.7)]
    plan = make_division(pair, None, 2, [], [])
    for model, one in zip(plan.chosen.models, pair, strict=True):
        judge = one.judge
        assert isinstance(judge, Formula)
        assert model.fleet is not None
        assert model.fleet.fleet in judge.asked
        assert model.share == pytest.approx(model.fleet.max_rate / model.wanted)
        assert model.low < model.share <= model.high <= 1.0
        points = plan.frontiers[model.model]
        assert [point.fleet for point in points if point.simulated] == [
            point.fleet for point in points if point.fleet in judge.asked
        ]
        assert all(point.rate <= model.wanted for point in points)
    assert plan.chosen.least_share > plan.alternatives[0].least_share
    assert all(sum(one.gpus.values()) == one.fleet.num_gpus for one in plan.chosen.models if one.fleet)
    used = sum(sum(one.gpus.values()) for one in plan.chosen.models)
    assert used + sum(plan.chosen.spare.values()) == 16


def test_a_search_that_ends_early_reports_what_it_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_division, "ROUNDS", 0)
    plan = division("8xH800,8xH20", f"{LARGE} rate=20 {SLO}", f"{SMALL} rate=60 {SLO}")
    assert plan.chosen.models == plan.alternatives[0].models


def test_rates_that_can_be_met_are_met_for_the_least_money() -> None:
    plan = division("8xH800,8xH20", f"{LARGE} rate=1 {SLO}", f"{SMALL} rate=5 {SLO}")
    assert shares(plan) == [1.0, 1.0]
    assert plan.verdict.startswith("every model gets its rate, for $")
    assert [one.gpus for one in plan.chosen.models] == [{"H20": 8}, {"H800": 1}], "8 H20 cost less than 4 H800"
    assert plan.chosen.price_per_hour < plan.alternatives[0].price_per_hour
    assert plan.chosen.spare == {"H800": 7}


def test_doing_nothing_is_judged_where_it_is_known_and_may_be_the_best() -> None:
    now = f"{SMALL} rate=1000 {SLO} now=3xH800:mixed", f"llama-3-8b rate=1 {SLO} now=1xH800:mixed"
    plan = division("4xH800", *now)
    kept = next(one for one in plan.alternatives if one.kind == "now")
    assert [one.fleet.fleet for one in kept.models if one.fleet] == ["3xH800@1:mixed", "1xH800@1:mixed"]
    assert plan.chosen.least_share >= kept.least_share
    alone = division("4xH800", now[0], f"llama-3-8b rate=1 {SLO}")
    kept = next(one for one in alone.alternatives if one.kind == "now")
    assert (kept.models[1].fleet, kept.least_share) == (None, 0.0)
    assert "doing nothing serves 0% of llama-3-8b's rate" in alone.verdict


def test_a_budget_is_that_of_an_equal_division_too() -> None:
    wanted = f"{SMALL} rate=60 {SLO}", f"llama-3-8b rate=60 {SLO}"
    plan = division("8xH800", *wanted, budget=4.0)
    (equal,) = plan.alternatives
    assert shares(division("8xH800", *wanted)) == [1.0, 1.0]
    assert equal.price_per_hour <= 4.0
    assert "too" not in plan.verdict.split("; ")[1], "what the budget does not allow is not done by halves of it"
    assert plan.chosen.least_share >= equal.least_share


def test_doing_nothing_beyond_the_budget_is_said_to_be() -> None:
    plan = division("8xH800", f"{SMALL} rate=60 {SLO} now=8xH800:mixed", budget=2.0)
    assert plan.chosen.least_share < 1.0
    assert plan.verdict.endswith(
        "doing nothing serves 100% of llama-3.1-8b's rate and costs $16.00, more than the budget"
    )


def test_one_model_by_itself_has_no_equal_division() -> None:
    plan = division("2xH800", f"{SMALL} rate=1 {SLO}")
    assert plan.alternatives == ()
    assert plan.verdict.startswith("every model gets its rate")


# --- what cannot be -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fleet", "texts", "budget", "said"),
    [
        ("1xH20", [f"{LARGE} rate=1", f"{SMALL} rate=1"], None, "the weights of llama-3-70b (141 GB) leave no useful"),
        ("4xH800", [f"{LARGE} rate=1", f"{SMALL} rate=1"], None, "llama-3-70b needs at least 1xH800@4:mixed"),
        ("8xH800", [f"{LARGE} rate=1", f"{SMALL} rate=1"], 9.0, "no division that serves every model costs at most $9"),
        ("4xH800", [f"{SMALL} rate=1 slo=ttft=1,tpot=0.0005"], None, "llama-3.1-8b: no instance of this hardware"),
        ("2xH800", [f"{SMALL} rate=1 now=2xH20:mixed"], None, "llama-3.1-8b is served by H20 now, which --fleet has"),
        (
            "3xH800",
            [f"{SMALL} rate=1 now=2xH800:mixed", "llama-3-8b rate=1 now=2xH800:mixed"],
            None,
            "4 H800 serve the models now, and --fleet has 3",
        ),
    ],
)
def test_what_no_division_can_do_is_said_in_a_sentence(
    fleet: str, texts: list[str], budget: float | None, said: str
) -> None:
    with pytest.raises(InvalidValue, match=re.escape(said)) as raised:
        division(fleet, *texts, budget=budget)
    assert "\n" not in str(raised.value)


def test_fleets_that_simulation_finds_hopeless_are_none() -> None:
    with pytest.raises(
        InvalidValue, match=r"no fleet of 4xH800 that was looked at serves 90% of llama-3.1-8b's requests"
    ):
        division("4xH800", f"{SMALL} rate=1", factor=0.0)


def test_fleets_that_serve_nothing_send_the_search_to_larger_ones() -> None:
    """One model needs 10 GPUs for anything, whatever the closed forms say of four."""

    class Large(Formula):
        def judge(self, fleet: Fleet, guess: float, policy: str | None = None) -> Judged:
            found = super().judge(fleet, guess, policy)
            return found if fleet.num_gpus >= 10 else Judged(fleet, 0.0, guess, None, found.policy)

    first, second = asked("16xH800", f"{SMALL} rate=60 {SLO}"), asked("16xH800", f"llama-3-8b rate=10 {SLO}")
    plan = make_division([first._replace(judge=Large(first.prepared, first.want, 0.8)), second], None, 2, [], [])
    assert plan.chosen.least_share == 1.0
    assert plan.chosen.models[0].gpus["H800"] >= 10
    assert plan.alternatives[0].models[0].fleet is None, "half of the fleet is too little"


def test_it_is_said_in_both_languages() -> None:
    plan = division("4xH800", f"{SMALL} rate=1000 {SLO}", f"llama-3-8b rate=1000 {SLO}")
    chinese = words("zh-Hant", {})
    said = render(plan.verdict_said, lambda code: chinese.raw(f"core.{code}"))
    assert "資源不足以滿足全部" in said
    assert f"{plan.chosen.least_share:.0%}" in said


# --- what to type -------------------------------------------------------------------------------------------------


def test_the_settings_are_ones_that_the_control_plane_takes(tmp_path: Path) -> None:
    file = tmp_path / "phaseplane.toml"
    file.write_text(apply_config([
        (Want(SMALL, 1.0), {"default": Slo(ttft_s=2.0, tpot_s=0.05), "batch": None}),
        (Want("/models/qwen3-14b", 1.0), {"default": Slo(ttft_s=1, tpot_s=1.5)}),
    ]))  # fmt: skip
    config = load_config(file, {}, {})
    assert {name: model.name for name, model in config.served.items()} == {
        SMALL: SMALL, "qwen3-14b": "/models/qwen3-14b",
    }  # fmt: skip
    assert {name: (one.ttft_s, one.tpot_s) for name, one in config.classes.items()} == {
        SMALL: (2.0, 0.05), "qwen3-14b": (1.0, 1.5),
    }  # fmt: skip


def test_a_directory_with_a_space_in_its_name_is_one_word_of_a_command() -> None:
    fleet = Fleet((Part(Shape("H800", 1), Role.MIXED, 2),))
    assert shlex.split(commands(fleet, None, "/models/my model")[0])[-3] == "/models/my model"


def test_what_is_there_stays_what_is_missing_starts_and_what_is_too_much_is_drained() -> None:
    shape, other = Shape("H800", 1), Shape("H20", 2)
    fleet = Fleet((Part(shape, Role.PREFILL, 1), Part(other, Role.DECODE, 3)))
    fresh = list(apply_commands([(Want(SMALL, 1.0), fleet, None)]))
    assert fresh[0] == "python -m controlplane.main --config phaseplane.toml"
    options = [parse_options(shlex.split(line, comments=True)[3:], {}) for line in fresh[1:2]]
    assert options[0].instances[0].instance_id == f"{SMALL}-prefill-0"
    assert fresh[2].endswith(f"--model {SMALL} --hardware H20 --tp 2 --instance={SMALL}-decode-{{0..2}}=decode")
    now = Fleet((Part(shape, Role.PREFILL, 3), Part(other, Role.DECODE, 1)))
    assert list(apply_commands([(Want(SMALL, 1.0), fleet, now)])) == [
        f"phaseplane drain ID  # 2xH800@1:prefill of {SMALL}, then stop what is empty",
        fresh[2].replace("{0..2}", "{1..2}"),
    ]
    assert list(apply_commands([(Want(SMALL, 1.0), fleet, fleet)])) == []


def test_pools_are_each_models_own() -> None:
    one = asked("2xH800", f"{SMALL} rate=1 {SLO} pool=1xCPU:kv_pool")
    plan = make_division([one, asked("2xH800", f"llama-3-8b rate=1 {SLO}")], None, 1, [], [])
    first, second = plan.chosen.models
    assert first.fleet is not None
    assert second.fleet is not None
    assert first.fleet.fleet.endswith(",1xCPU:kv_pool")
    assert "kv_pool" not in second.fleet.fleet
    pools = [line for line in plan.commands if "kv_pool" in line]
    assert len(pools) == 1
    assert f"--model {SMALL} --hardware CPU --instance={SMALL}-pool-0=kv_pool" in pools[0]
