"""Why a placement was chosen or not, by every policy, is a code that is said in Chinese."""

from __future__ import annotations

import pytest
from policy_kit import answer, d, k, m, p

from controlplane.core.placement import Candidate
from controlplane.core.policies.names import POLICY_NAMES
from ui.words import words

CHINESE = words("zh-Hant", {})
SPLIT = (p("p0"), p("p1", queued=900), d("d0", rows=3, context=900, blocks=90), d("d1"))
MIXED = (m("m0", rows=2), m("m1"))


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("fleet", [SPLIT, MIXED], ids=["split", "mixed"])
@pytest.mark.parametrize("held", [{}, {"p0": 512, "m1": 512}], ids=["cold", "cached"])
def test_every_policy_says_why_in_chinese(policy: str, fleet: tuple[object, ...], held: dict[str, int]) -> None:
    found = answer(policy, *fleet, k("k0"), held=held)  # type: ignore[arg-type]
    assert isinstance(found, list)
    assert found
    for one in found:
        assert isinstance(one, Candidate)
        assert one.reason
        for said in one.reason:
            assert str(said), "in English"
            assert CHINESE.sentence(said, "") not in ("", str(said)), said
