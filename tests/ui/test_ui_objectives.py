"""The command objectives: what it shows, sends and refuses."""

from __future__ import annotations

import json

import msgspec
import pytest


def test_it_shows_classes_and_prices_and_changes_nothing(run, fleet):
    ran = run("objectives", "--url", fleet.url)
    assert ran.code == 0
    assert "default  TTFT 2 s, TPOT 0.2 s  the same" in ran.out
    assert ["H800", "2", "1", "$4.00"] in [line.split() for line in ran.out.splitlines()]
    assert [path for path, _ in fleet.asked] == ["GET /v1/classes"]


def test_it_sets_one_class_against_the_version_it_saw(run, fleet):
    ran = run("objectives", "default", "ttft=1,tpot=50ms,e2e=30", "--url", fleet.url)
    assert ran.code == 0
    assert "default  TTFT 1 s, TPOT 0.05 s, E2E 30 s  TTFT 2 s, TPOT 0.2 s" in ran.out
    path, body = fleet.asked[-1]
    assert (path, body["base_version"]) == ("PUT /v1/classes", 4)
    assert body["classes"] == {"default": {"ttft_s": 1.0, "tpot_s": 0.05, "e2e_s": 30.0}}
    found = json.loads(run("objectives", "default", "none", "--json", "--url", fleet.url).out)
    assert found["classes"][0]["slo"] is None


def test_status_says_since_when_a_class_is_counted_anew(run, fleet):
    said = "objectives of default changed 20 s ago: its good, total, attainment and goodput count from then on"
    assert said not in run("status", "--url", fleet.url).out
    (one,) = fleet.fleet.classes
    changed = msgspec.structs.replace(one, judged_for_s=20.0)
    fleet.fleet = msgspec.structs.replace(fleet.fleet, classes=(changed,))
    assert said in run("status", "--url", fleet.url).out


@pytest.mark.parametrize("text", ["ttft=1", "ttft=0,tpot=1", "other=ttft=1,tpot=1", "fast", ""])
def test_what_are_no_objectives_is_refused_before_anything_is_asked(run, fleet, text):
    ran = run("objectives", "default", text, "--url", fleet.url)
    assert (ran.code, fleet.asked) == (2, [])
    assert "ttft=2,tpot=200ms" in ran.err
    assert run("objectives", "default", "--url", fleet.url).code == 2


def test_a_refusal_is_the_control_planes_sentence(run, fleet):
    fleet.apply_status = 409
    ran = run("objectives", "default", "none", "--url", fleet.url)
    assert ran.code == 1
    assert "the fleet changed: look again" in ran.err
