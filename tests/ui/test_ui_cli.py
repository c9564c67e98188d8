"""The program as a user meets it: what it prints, its exit status, its sentences, and where settings come from."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from ui_fakes import Fake, a_fleet, a_plan

from transfer.api import Prediction
from ui import cli


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_bare_prints_three_lines(run):
    ran = run()
    assert ran.code == 0
    assert len(ran.out.strip().splitlines()) == 3
    assert "phaseplane up" in ran.out.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["statu"], "no such command 'statu'"),
        (["status", "--jsn"], "--jsn"),
        (["rebalance"], "missing argument 'XPYD'"),
        (["bench", "--num", "some"], "'--num'"),
        (["bench", "--num", "0"], "'--num'"),
        (["bench", "--rate", "-1"], "--rate must be above 0"),
        (["bench", "--prompt-tokens", "9-3"], "'9-3' is not a number of tokens"),
        (["bench", "--slo", "ttft:2"], "needs both ttft and tpot"),
        (["bench", "--slo", "ttft:x,tpot:1"], "is not an objective"),
        (["bench", "--classes", "a:-1"], "is not a mix of classes"),
        (["status", "--config", "/nowhere/x.toml"], "/nowhere/x.toml"),
    ],
)
def test_usage_errors_are_one_sentence_and_exit_2(run, arguments, said):
    ran = run(*arguments)
    assert ran.code == 2
    assert said in ran.err
    assert ran.err.startswith("error: ")
    assert len(ran.err.strip().splitlines()) == 1
    assert ran.out == ""


@pytest.mark.parametrize("command", [["status"], ["rebalance", "1P2D"], ["undo", "p"], ["why", "r"], ["chat", "hi"]])
def test_no_fleet_names_the_next_command(run, command):
    ran = run(*command, "--url", f"http://127.0.0.1:{closed_port()}")
    assert ran.code == 1
    assert "no fleet answers" in ran.err
    assert "`phaseplane up`" in ran.err
    assert "Traceback" not in ran.err


def test_another_server_is_told_from_a_fleet(run, fleet: Fake):
    fleet.fleet = {"hello": "world"}  # type: ignore[assignment]
    ran = run("status", "--url", fleet.url)
    assert ran.code == 1
    assert "not like a Phaseplane control plane" in ran.err
    assert "--url" in ran.err


def test_a_bug_is_a_sentence_with_a_file(run, monkeypatch, tmp_path):
    def explode(*_: object) -> None:
        raise KeyError("boom")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("ui.fleet_commands.asyncio.run", lambda work: (work.close(), explode()))
    ran = run("status")
    assert ran.code == 1
    assert "Traceback" not in ran.err
    assert "KeyError: 'boom'" in Path(ran.err.split()[-1]).read_text()


def test_status_json_is_the_fleet(run, fleet: Fake):
    ran = run("status", "--url", fleet.url, "--json")
    assert ran.code == 0
    value = json.loads(ran.out)
    assert value["xpyd"] == "1P1D"
    assert [i["role"] for i in value["instances"]] == ["prefill", "decode"]
    assert value["goodput"] | {"per_s": 1.5, "per_gpu": 0.75, "window_s": 60.0} == value["goodput"]
    assert (value["attainment"], value["orphaned_kv_blocks"], value["in_flight"]) == (0.9, 0, 3)


def test_status_table_has_every_instance(run, fleet: Fake):
    ran = run("status", "--url", fleet.url)
    assert ran.code == 0
    for word in ("1P1D", "cpu-0", "cpu-1", "decode", "90.0%", "Objectives are met."):
        assert word in ran.out


def test_api_key_is_sent_and_a_missing_one_explained(run, fleet: Fake, monkeypatch):
    fleet.api_key = "secret-key"
    ran = run("status", "--url", fleet.url)
    assert ran.code == 1
    assert "PHASEPLANE_API_KEY" in ran.err
    monkeypatch.setenv("PHASEPLANE_API_KEY", "secret-key")
    assert run("status", "--url", fleet.url).code == 0


def test_why_explains_and_refuses_the_unknown(run, fleet: Fake):
    ran = run("why", "cmpl-1", "--url", fleet.url)
    assert ran.code == 0
    for word in ("prefill cpu-0", "its KV is full", "queue", "25%"):
        assert word in ran.out
    ran = run("why", "cmpl-2", "--url", fleet.url)
    assert ran.code == 1
    assert "there is no request cmpl-2" in ran.err


def test_rebalance_follows_the_plan_to_its_end(run, fleet: Fake):
    steps = a_plan().steps
    moving = tuple(s.__class__(instance_id="cpu-0", from_role="prefill", to_role="decode", status="draining",
                               num_migrated=2) for s in steps)  # fmt: skip
    done = tuple(s.__class__(instance_id="cpu-0", from_role="prefill", to_role="decode", status="done",
                             num_migrated=2) for s in steps)  # fmt: skip
    measured = a_plan().predicted
    ended = a_plan("done", steps=done, measured=Prediction(duration_s=0.5, basis="being measured"))
    fleet.plans = [a_plan(), a_plan("applying", steps=moving), ended, a_plan("done", steps=done, measured=measured)]
    ran = run("rebalance", "1P2D", "--url", fleet.url, "--json")
    assert ran.code == 0
    report = json.loads(ran.out)
    assert report["plan_id"] == "plan-1"
    assert report["steps"][0]["status"] == "done"
    assert report["predicted"]["goodput_per_s"] == 2.0
    assert report["measured"]["goodput_per_s"] == 2.0
    assert report["failed"] is None
    assert "cpu-0: prefill -> decode, draining, 2 migrated" in ran.err
    asked = dict(fleet.asked)
    assert asked["POST /v1/plans"]["xpyd"] == "1P2D"
    assert asked["POST /v1/plans/plan-1/apply"]["base_version"] == 4
    assert asked["POST /v1/plans/plan-1/apply"]["idempotency_key"]


def test_a_script_need_not_wait_for_the_measurement(run, fleet: Fake):
    fleet.plans = [a_plan(), a_plan("done", measured=Prediction(duration_s=0.5)), a_plan("failed", failed="too late")]
    ran = run("rebalance", "1P2D", "--url", fleet.url, "--json", "--no-measure")
    assert ran.code == 0
    assert json.loads(ran.out)["measured"]["duration_s"] == 0.5


def test_dry_run_applies_nothing(run, fleet: Fake):
    ran = run("rebalance", "1P2D", "--dry-run", "--url", fleet.url, "--timeout", "2")
    assert ran.code == 0
    assert "prefill queue grows" in ran.out
    assert [path for path, _ in fleet.asked] == ["POST /v1/plans"]


def test_a_failed_plan_exits_1(run, fleet: Fake):
    fleet.plans = [a_plan(), a_plan("failed", failed="cpu-0 refused the role")]
    ran = run("rebalance", "1P2D", "--url", fleet.url)
    assert ran.code == 1
    assert "cpu-0 refused the role" in ran.err


def test_a_changed_fleet_is_a_sentence(run, fleet: Fake):
    fleet.apply_status = 409
    ran = run("rebalance", "1P2D", "--url", fleet.url)
    assert ran.code == 1
    assert "the fleet changed since" in ran.err
    assert "`phaseplane status" in ran.err


def test_undo_applies_the_inverse_against_the_fleet_as_it_is(run, fleet: Fake):
    fleet.fleet = a_fleet(version=9)
    fleet.plans = [a_plan("done", plan_id="plan-2")]
    assert run("undo", "plan-1", "--url", fleet.url, "--no-measure").code == 0
    assert dict(fleet.asked)["POST /v1/plans/plan-1/undo"]["base_version"] == 9


def test_flag_over_variable_over_file_over_default(run, fleet: Fake, tmp_path, monkeypatch):
    config = tmp_path / "phaseplane.toml"
    config.write_text(f'[client]\nurl = "{fleet.url}"\n[bench]\nnum = 3\nrate = "inf"\noutput-tokens = 3\n')
    report = json.loads(run("bench", "--config", str(config), "--json").out)
    assert report["offered"] == 3
    monkeypatch.setenv("PHASEPLANE_BENCH_NUM", "4")
    assert json.loads(run("bench", "--config", str(config), "--json").out)["offered"] == 4
    assert json.loads(run("bench", "--config", str(config), "--json", "--num", "5").out)["offered"] == 5


def test_a_commands_own_table_wins_over_the_shared_one(run, fleet: Fake, tmp_path):
    config = tmp_path / "phaseplane.toml"
    config.write_text(f'[client]\nurl = "http://127.0.0.1:{closed_port()}"\n[status]\nurl = "{fleet.url}"\n')
    assert run("status", "--config", str(config)).code == 0


def test_unknown_keys_and_variables_name_the_nearest(run, tmp_path, monkeypatch):
    config = tmp_path / "phaseplane.toml"
    config.write_text("[bench]\nnumm = 3\n")
    ran = run("bench", "--config", str(config))
    assert ran.code == 2
    assert "did you mean bench.num?" in ran.err
    config.write_text("bench = 3\n")
    assert "write [bench]" in run("bench", "--config", str(config)).err
    config.write_text("[bench\n")
    assert "is not TOML" in run("bench", "--config", str(config)).err
    monkeypatch.setenv("PHASEPLANE_BENCH_RAT", "3")
    ran = run("bench")
    assert ran.code == 2
    assert "did you mean PHASEPLANE_BENCH_RATE?" in ran.err


def test_a_wrong_value_in_the_file_is_a_sentence(run, tmp_path):
    config = tmp_path / "phaseplane.toml"
    config.write_text('[bench]\nnum = "many"\n')
    ran = run("bench", "--config", str(config))
    assert ran.code == 2
    assert "'--num'" in ran.err


def test_pull_passes_on_the_answer_of_the_puller(run):
    ran = run("pull", "no-such-model")
    assert ran.code == 1
    assert "`phaseplane pull smollm2-135m`" in ran.err


def test_every_command_has_help(run):
    for command in ("up", "status", "rebalance", "undo", "pull", "chat", "bench", "doctor", "why"):
        ran = run(command, "--help")
        assert ran.code == 0
        assert f"phaseplane {command}" in ran.out


def test_interrupt_is_130(run, monkeypatch):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", stop)
    assert run().code == 130
