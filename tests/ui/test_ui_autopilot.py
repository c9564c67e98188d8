"""autopilot, pin and unpin as a user meets them, and what status says of them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec
from ui_fakes import a_fleet

from controlplane.core.autopilot import rule
from controlplane.core.config import CoreConfig
from transfer.autopilot import AutopilotView, LookRow
from ui import autopilot_command


def test_the_help_tells_the_controller_in_the_sentence_that_it_is(run):
    """One sentence, three timers: the same words in the code, in the help and in the document."""
    config = CoreConfig()
    said = str(
        rule(config.autopilot_every_s, config.autopilot_window_s, config.traffic_window_s, config.autopilot_rest_s)
    )
    assert said in " ".join((inspect.getdoc(autopilot_command.autopilot) or "").split())
    ran = run("autopilot", "--help")
    assert ran.code == 0
    assert said in " ".join(ran.out.split())
    assert said in " ".join((Path(__file__).parents[2] / "docs" / "autopilot.md").read_text().split())
    assert len(re.findall(r"\b\d+ s\b", said)) == 3
    timers = [name for name in CoreConfig.__struct_fields__ if name.startswith("autopilot_") and name.endswith("_s")]
    assert timers == ["autopilot_every_s", "autopilot_window_s", "autopilot_rest_s"]


def test_looking_shows_mode_line_pins_and_score_and_changes_nothing(run, fleet):
    ran = run("autopilot", "--url", fleet.url)
    assert ran.code == 0
    assert "autopilot advise: move n3 P->D: +18 %, 80 % interval 12 to 23, about 6 s" in ran.out
    assert "pinned: cpu-0, by alice, for another 90 s (a test)" in ran.out
    assert "of 1 scored moves: attainment -2.0%" in ran.out
    assert fleet.asked == [("GET /v1/autopilot", None)]
    document = msgspec.json.decode(run("autopilot", "--json", "--url", fleet.url).out, type=AutopilotView)
    assert document == fleet.autopilot


def test_a_mode_and_limits_are_put(run, fleet):
    assert run("autopilot", "auto", "--max-moves", "2", "--floor", "2", "--url", fleet.url).code == 0
    method, body = fleet.asked[-1]
    assert method == "PUT /v1/autopilot"
    assert (body["mode"], body["floor"], body["max_moves"]) == ("auto", 2, 2)


def test_a_mode_that_is_none_is_a_sentence(run, fleet):
    ran = run("autopilot", "on", "--url", fleet.url)
    assert ran.code == 2
    assert "'on' is no mode of the autopilot; choose off, advise or auto" in ran.err
    assert fleet.asked == []


def test_pins_are_put_and_released(run, fleet):
    said = run("pin", "--url", fleet.url)
    assert said.code == 0
    assert fleet.autopilot.line not in said.out, "the last look was before the pin"
    assert run("pin", "cpu-0", "--ttl", "60", "--why", "a test", "--url", fleet.url).code == 0
    assert [(method, body["subject"], body["ttl_s"]) for method, body in fleet.asked] == [
        ("POST /v1/autopilot/pins", "split", None), ("POST /v1/autopilot/pins", "cpu-0", 60.0),
    ]  # fmt: skip
    assert run("unpin", "--url", fleet.url).code == 0
    assert fleet.asked[-1][0] == "DELETE /v1/autopilot/pins/split"
    ran = run("unpin", "cpu-9", "--url", fleet.url)
    assert ran.code == 1
    assert "'cpu-9' is not pinned" in ran.err


def test_status_says_what_the_autopilot_would_do(run, fleet):
    fleet.fleet = a_fleet(autopilot="advise", advice="hold: no confident move")
    assert "autopilot (advise): hold: no confident move" in run("status", "--url", fleet.url).out
    fleet.fleet = a_fleet()
    assert "autopilot" not in run("status", "--url", fleet.url).out


def test_since_shows_what_it_said_before(run, fleet):
    fleet.looks = [
        LookRow("e-2", "m", "move", "move p0 P->D: +18 %", 1, 1_700_000_060.0, 1_700_000_060.0),
        LookRow("e-1", "m", "met", "hold: nothing to gain", 20, 1_700_000_000.0, 1_700_000_057.0),
    ]
    ran = run("autopilot", "--since", "2h", "--url", fleet.url)
    assert ran.code == 0
    assert re.search(r"20 .*met.*nothing to gain[\s\S]* 1 .*move p0 P->D", ran.out), ran.out
    document = run("autopilot", "--since", "7200", "--json", "--url", fleet.url).out
    assert msgspec.json.decode(document, type=list[LookRow]) == fleet.looks
    wrong = run("autopilot", "--since", "yesterday", "--url", fleet.url)
    assert (wrong.code, "'yesterday' is no time; give seconds or such as 30m, 24h, 2d" in wrong.err) == (2, True)
    assert run("autopilot", "auto", "--since", "2h", "--url", fleet.url).code == 2
