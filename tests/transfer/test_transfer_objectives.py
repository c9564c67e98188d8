"""Objectives as people write them."""

from __future__ import annotations

import pytest

from transfer.errors import InvalidValue
from transfer.objectives import parse_objectives
from transfer.terms import Slo


@pytest.mark.parametrize(
    ("text", "name", "slo"),
    [
        ("ttft:2,tpot:0.2", "", Slo(ttft_s=2, tpot_s=0.2)),
        ("ttft=2, tpot=200ms", "", Slo(ttft_s=2, tpot_s=0.2)),
        ("tpot=.05,ttft=1.5s,e2e=9", "", Slo(ttft_s=1.5, tpot_s=0.05, e2e_s=9)),
        ("chat=ttft:1,tpot:0.1", "chat", Slo(ttft_s=1, tpot_s=0.1)),
        ("chat:ttft=1,tpot=0.1", "chat", Slo(ttft_s=1, tpot_s=0.1)),
        ("a=b=ttft=1,tpot=1e-1", "a=b", Slo(ttft_s=1, tpot_s=0.1)),
    ],
)
def test_both_ways_of_writing_them_are_read(text: str, name: str, slo: Slo) -> None:
    assert parse_objectives([text]) == {name: slo}


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:2", "ttft:2,tpot:0", "ttft:2,tpot:-1", "ttft:2,tpot:1min", "ttft:2,x=tpot:1", "1,2"]
)
def test_others_are_a_sentence(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"write it like --slo ttft:2,tpot:0\.2"):
        parse_objectives([text])
