"""The program as a user meets it: what it prints, its exit status, its sentences, and where settings come from."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from pathlib import Path

import msgspec
import pytest
from ui_fakes import Fake, a_fleet, a_plan
from ui_kit import closed_port

from transfer.api import ClassView, KvView, ModelView, Prediction, Quantiles
from transfer.said import say
from ui import cli
from ui.rebalance import shapes


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


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://no-such-host.invalid:80", "no machine is known by the name no-such-host.invalid"),
        ("http://127.0.0.1:99999", "is not the address of a fleet"),
        ("http://[::1", "is not the address of a fleet"),
        ("ftp://x", "is not the address of a fleet"),
    ],
)
def test_an_address_that_cannot_be_is_told(run, url, said):
    ran = run("status", "--url", url)
    assert ran.code == 1
    assert said in ran.err
    assert "unknown error" not in ran.err


@pytest.mark.parametrize("command", [["status"], ["rebalance", "1P2D"], ["undo", "p"], ["why", "r"], ["chat", "hi"]])
@pytest.mark.parametrize("status", [302, 404, 501])
def test_a_web_server_is_no_fleet(run, fleet: Fake, command, status):
    fleet.web_status = status
    ran = run(*command, "--url", fleet.url)
    assert ran.code == 1
    assert f"with HTTP {status}, as no Phaseplane control plane of this version does" in ran.err
    assert "check --url" in ran.err


def test_what_speaks_no_http_is_no_fleet(run):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def greet() -> None:
            for _ in range(2):  # an HTTP client tries a dropped GET once more
                with contextlib.suppress(OSError):
                    peer = server.accept()[0]
                    peer.sendall(b"220 mail.example ready\r\n")
                    peer.close()

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        ran = run("status", "--url", f"http://127.0.0.1:{server.getsockname()[1]}")
    assert ran.code == 1
    assert "does not speak HTTP, so it is no fleet" in ran.err


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


def test_status_says_how_many_that_wait_are_past_their_objective_and_why(run, fleet: Fake):
    fleet.fleet = msgspec.structs.replace(fleet.fleet, queue_depth=180)
    assert "180 of them waiting for a place, up" in run("status", "--url", fleet.url).out
    fleet.fleet = msgspec.structs.replace(fleet.fleet, queue_late=172, notice=str(say("notice.late")))
    said = run("status", "--url", fleet.url).out
    assert "180 of them waiting for a place (172 past their objective), up" in said
    assert 'scheduler.early_reject = "objective"' in said


def test_status_says_what_is_missed_now_and_where_the_time_is_lost(run, fleet: Fake):
    fleet.fleet = msgspec.structs.replace(
        fleet.fleet,
        recent_attainment=0.4,
        missed_by={"tpot": 9, "ttft": 2},
        bottleneck="queue",
        stages_s={"queue": 1.0},
    )
    said = run("status", "--url", fleet.url).out
    assert "attainment 40.0%; since start: attainment 90.0%" in said
    assert "objectives missed in the last 60 s, requests: TPOT 9, TTFT 2" in said
    assert "bottleneck of those that missed, until the first token: queue, waiting for compute" in said
    fleet.fleet = msgspec.structs.replace(fleet.fleet, missed_by={"tpot": 9})
    said = run("status", "--url", fleet.url).out
    assert "their first token came in time, so it is decode that is too slow" in said
    assert "bottleneck" not in said
    rejected = ClassView(
        name="default",
        slo=None,
        good=0,
        total=40,
        attainment=0.0,
        ttft_s=Quantiles(),
        tpot_s=Quantiles(),
        recent_total=40,
    )
    fleet.fleet = msgspec.structs.replace(fleet.fleet, classes=(rejected,))
    said = run("status", "--url", fleet.url).out
    assert "decode that is too slow" not in said, "others came to no answer"
    assert "bottleneck of those that missed" in said


def test_status_says_which_of_several_models_misses(run, fleet: Fake):
    assert "goodput, last" not in run("status", "--url", fleet.url).out, "of one model"
    two = (ModelView(name="tiny", good=9, total=9, attainment=1.0), ModelView(name="big", good=1, total=4,
           attainment=0.25, recent_per_s=0.5, ttft_s=Quantiles(p50=3.0, p90=4.0, p99=5.0)))  # fmt: skip
    fleet.fleet = msgspec.structs.replace(fleet.fleet, by_model=two)
    lines = run("status", "--url", fleet.url).out.splitlines()
    row = next(line for line in lines if line.startswith("big")).split()
    assert row[:4] == ["big", "1", "4", "25.0%"]
    assert row[-1] == "0.50/s"


def test_status_says_what_predictions_of_an_instance_are_worth(run, fleet: Fake):
    first, second = fleet.fleet.instances
    fitted = msgspec.structs.replace(first, provenance="fitted", latency_error=0.034, speed=1.25)
    preset = msgspec.structs.replace(second, provenance="preset")
    fleet.fleet = msgspec.structs.replace(fleet.fleet, instances=(fitted, preset))
    lines = run("status", "--url", fleet.url).out.splitlines()
    assert next(line for line in lines if line.startswith("cpu-0")).endswith("fitted \u00b13.4% x1.25")
    assert next(line for line in lines if line.startswith("cpu-1")).rstrip().endswith("preset")


def test_why_says_what_its_predictions_are_worth(run, fleet: Fake):
    record, chosen = fleet.record, fleet.record.why[0]
    fitted = msgspec.structs.replace(chosen, provenance="fitted", error=0.03)
    far = msgspec.structs.replace(chosen, prefill=None, decode="cpu-9", chosen=False, provenance="extrapolated")
    fleet.record = msgspec.structs.replace(record, why=(fitted,))
    said = run("why", "cmpl-1", "--url", fleet.url).out
    assert "step times are fitted, median error 3.0%\n" in said
    fleet.record = msgspec.structs.replace(record, why=(fitted, far))
    said = run("why", "cmpl-1", "--url", fleet.url).out
    assert "step times are fitted, median error 3.0% (cpu-0 -> cpu-1)" in said
    assert "extrapolated beyond the steps that were measured, error not measured (cpu-9)" in said


def test_api_key_is_sent_and_a_missing_one_explained(run, fleet: Fake, monkeypatch):
    fleet.api_key = "secret-key"
    ran = run("status", "--url", fleet.url)
    assert ran.code == 1
    assert "PHASEPLANE_API_KEY" in ran.err
    monkeypatch.setenv("PHASEPLANE_API_KEY", "secret-key")
    assert run("status", "--url", fleet.url).code == 0


def test_status_says_what_counts_since_when(run, fleet: Fake):
    said = run("status", "--url", fleet.url).out
    assert "last 60 s: goodput 1.50/s" in said
    assert "since start: attainment 90.0%" in said
    assert "p50 and p99 are of requests that ended in the last 60 s" in said


def test_stages_and_predictions_add_up_to_ttft(run, fleet: Fake):
    rows = [line.split() for line in run("why", "cmpl-1", "--url", fleet.url).out.splitlines()]
    stages = {row[0]: float(row[1]) for row in rows if len(row) > 2 and row[2] == "ms" and row[0] != "chosen"}
    assert stages.pop("TTFT") == sum(stages.values()) == 200.0
    assert [*stages] == ["queue", "decode_admission", "prefill", "transfer", "decode"]
    chosen = next(row for row in rows if row and row[0] == "chosen")
    assert chosen[1:3] == ["cpu-0", "cpu-1"]
    assert [float(chosen[i]) for i in (3, 5, 7, 9)] == [200.0, 50.0, 100.0, 50.0]


def test_why_says_where_kv_comes_from(run, fleet: Fake):
    record, chosen = fleet.record, fleet.record.why[0]
    fetched = msgspec.structs.replace(chosen, kv_way="both", kv_source="pool-0", fetched_blocks=7, fetch_s=0.025)
    fleet.record = msgspec.structs.replace(record, why=(fetched, *record.why[1:]))
    said = " ".join(run("why", "cmpl-1", "--url", fleet.url).out.split())
    assert "fetch 7 blocks from pool-0 in 25.0 ms while computing the rest" in said


def test_status_says_which_tier_hits_and_whether_fetching_paid(run, fleet: Fake):
    kv = KvView(looked_up_tokens=1000, device_tokens=250, pool_dram_tokens=100, pool_ssd_tokens=100, useful_tokens=150)
    pool = msgspec.structs.replace(fleet.fleet.instances[0], id="pool-0", ssd_blocks=77, ssd_capacity_blocks=100)
    fleet.fleet = msgspec.structs.replace(fleet.fleet, kv=kv, instances=(*fleet.fleet.instances, pool))
    said = run("status", "--url", fleet.url).out
    assert "device 25%, pool memory 10%, pool SSD 10%; fetching beat computing for 75%" in said
    assert next(line for line in said.splitlines() if line.startswith("pool-0")).split()[-1] == "77"


def test_why_says_who_computed_a_prompt_without_a_prefill_instance(run, fleet: Fake):
    record = fleet.record
    fleet.record = msgspec.structs.replace(record, why=(msgspec.structs.replace(record.why[0], prefill=None),))
    said = run("why", "cmpl-1", "--url", fleet.url).out
    assert "the decode instance computes the prompt itself" in said
    assert "the wait before that is not in these columns" in said


def test_why_explains_and_refuses_the_unknown(run, fleet: Fake):
    ran = run("why", "cmpl-1", "--url", fleet.url)
    assert ran.code == 0
    for word in ("prefill cpu-0", "its KV is full", "queue", "25%"):
        assert word in ran.out
    ran = run("why", "cmpl-2", "--url", fleet.url)
    assert ran.code == 1
    assert "there is no request cmpl-2" in ran.err


def test_why_without_an_id_takes_the_newest_that_missed(run, fleet: Fake):
    ran = run("why", "--url", fleet.url)
    assert ran.code == 1
    assert "no finished request missed its objectives" in ran.err
    fleet.record = msgspec.structs.replace(fleet.record, good=False)
    assert "request cmpl-1 (tiny, class default): ok, missed its objectives" in run("why", "--url", fleet.url).out


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
    table = [line.split() for line in ran.out.splitlines()]
    assert ["before", "predicted", "measured"] in table
    assert ["goodput", "1.50/s", "2.00/s", "(1.00", "to", "3.00)", "-"] in table
    assert [path for path, _ in fleet.asked] == ["GET /v1/fleet", "POST /v1/plans"]


def test_a_shape_of_another_size_is_told_what_is_possible(run, fleet: Fake):
    fleet.plan_refusal = "1P2D names 3 instances and the fleet has 2; name each of them once"
    ran = run("rebalance", "1P2D", "--url", fleet.url)
    assert ran.code == 1
    assert fleet.plan_refusal in ran.err
    assert "This fleet is 1P1D, 2 instances that can change role: it can be 1P1D or 2M" in ran.err
    assert "`phaseplane up --prefill 2 --decode 1`" in ran.err


def test_shapes_name_every_instance():
    assert shapes(1) == "1M"
    assert shapes(3).startswith("1P2D, 2P1D, 3M")
    assert shapes(64).startswith("1P63D, 2P62D and so on to 63P1D, 64M")


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


def test_pull_passes_on_the_answer_of_the_puller(run):
    ran = run("pull", "no-such-model")
    assert ran.code == 1
    assert "`phaseplane pull smollm2-135m`" in ran.err


def test_every_command_has_help(run):
    for command in ("up", "status", "rebalance", "undo", "pull", "chat", "bench", "doctor", "why"):
        ran = run(command, "--help")
        assert ran.code == 0
        assert f"phaseplane {command}" in ran.out
        assert "env var" not in ran.out
        assert "is also a variable" in " ".join(ran.out.split())
    ran = run("status", "--help")
    assert ran.out.count("http://127.0.0.1:8000") == 1
    assert "PHASEPLANE_STATUS_JSON" in ran.out


def test_interrupt_is_130(run, monkeypatch):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", stop)
    assert run().code == 130
