"""The benchmark client against a server whose delays are known, and its arithmetic on prepared samples."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading

import pytest
from ui_fakes import Fake, a_fleet, eventually

from transfer.terms import Slo
from ui.measure import Ending, Sample, quantiles, summarize
from ui.sse import read_events
from ui.workload import PromptMaker, parse_classes, parse_slos


def bench(run, fleet: Fake, *more: str):
    ran = run("bench", "--url", fleet.url, "--output-tokens", "3", "--json", *more)
    return ran, json.loads(ran.out)


@pytest.mark.parametrize("text", ['["ttft:1,tpot:0.5"]', '"ttft:1,tpot:0.5"'])
def test_objectives_may_stand_in_the_file(run, fleet: Fake, tmp_path, text: str):
    config = tmp_path / "phaseplane.toml"
    config.write_text(f"[bench]\nslo = {text}\n")
    ran, report = bench(run, fleet, "--rate", "inf", "--num", "1", "--config", str(config))
    assert ran.code == 0
    assert (report["classes"][0]["slo"]["ttft_s"], report["classes"][0]["slo"]["tpot_s"]) == (1.0, 0.5)


def test_known_delays_give_known_percentiles(run, fleet: Fake):
    fleet.first_delay_s, fleet.gap_s = 0.2, 0.1
    ran, report = bench(run, fleet, "--rate", "20", "--num", "8", "--slo", "ttft:1,tpot:0.5")
    assert ran.code == 0
    assert (report["offered"], report["completed"], report["errors"]) == (8, 8, 0)
    assert 0.19 < report["ttft_s"]["p50"] < 0.6  # a sleep is never short, and long only on a busy machine
    assert 0.095 < report["tpot_s"]["p50"] < 0.3
    assert 0.39 < report["e2e_s"]["p50"] < 1.2
    assert 0.095 < report["max_itl_s"]["p50"] < 0.5
    assert report["attainment"] == 1.0
    assert report["goodput_per_s"] == pytest.approx(8 / report["wall_s"])
    assert report["output_tokens"] == 24


def test_a_missed_objective_is_not_good(run, fleet: Fake):
    fleet.gap_s = 0.1
    _, report = bench(run, fleet, "--rate", "inf", "--num", "3", "--slo", "ttft:1,tpot:0.02")
    assert (report["completed"], report["good"], report["attainment"]) == (3, 0, 0.0)
    assert report["goodput_per_s"] == 0.0


def test_objectives_come_from_the_fleet_and_without_any_goodput_is_null(run, fleet: Fake):
    _, report = bench(run, fleet, "--rate", "inf", "--num", "2")
    assert report["attainment"] == 1.0
    assert report["classes"][0]["slo"]["ttft_s"] == 2.0
    fleet.fleet = a_fleet(classes=())
    _, report = bench(run, fleet, "--rate", "inf", "--num", "2")
    assert report["goodput_per_s"] is None
    assert report["attainment"] is None


def test_refusals_errors_and_broken_streams_are_told_apart(run, fleet: Fake):
    fleet.statuses, fleet.broken = {0: 429, 1: 500}, {2}
    ran, report = bench(run, fleet, "--rate", "200", "--num", "6", "--slo", "ttft:1,tpot:1")
    assert ran.code == 1
    assert (report["offered"], report["completed"], report["rejected"], report["errors"]) == (6, 3, 1, 2)
    assert report["attainment"] == pytest.approx(3 / 6)
    assert any("HTTP 500: too much" in text for text in report["error_samples"])
    assert any("the decode instance is lost" in text for text in report["error_samples"])


def test_wrong_text_is_an_error(run, fleet: Fake, tmp_path):
    lines = [{"prompt": f"p{i}", "max_tokens": 3, "expect": "abcdef"} for i in range(4)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran, report = bench(run, fleet, "--rate", "inf", "--prompts-file", str(prompts))
    assert (ran.code, report["completed"], report["wrong"]) == (0, 4, 0)
    fleet._arrivals, fleet.texts = 0, {2: ("ab", "cX", "ef")}
    ran, report = bench(run, fleet, "--rate", "inf", "--prompts-file", str(prompts))
    assert (ran.code, report["completed"], report["wrong"], report["errors"]) == (1, 3, 1, 1)
    assert "differs from the expected one at character 3" in report["error_samples"][0]


def test_a_missing_token_is_wrong(run, fleet: Fake):
    fleet.texts = {1: ("ab", "cd")}
    _, report = bench(run, fleet, "--rate", "inf", "--num", "3")
    assert (report["completed"], report["wrong"]) == (2, 1)
    assert "2 tokens came instead of 3" in report["error_samples"][0]


def test_a_stream_that_just_ends_is_an_error(run, fleet: Fake):
    fleet.truncated = {1}
    _, report = bench(run, fleet, "--rate", "inf", "--num", "3")
    assert (report["completed"], report["errors"]) == (2, 1)
    assert "ended without a finish_reason" in report["error_samples"][0]


def test_a_slow_answer_times_out_and_is_dropped_on_the_server(run, fleet: Fake):
    fleet.silent = {0}
    ran, report = bench(run, fleet, "--rate", "inf", "--num", "2", "--timeout", "0.4")
    assert (ran.code, report["timed_out"], report["errors"], report["completed"]) == (1, 1, 1, 1)
    assert eventually(lambda: fleet.num_closed_by_client == 1)


def test_saved_answers_are_demanded_by_the_next_run(run, fleet: Fake, tmp_path):
    saved = tmp_path / "answers.jsonl"
    _, report = bench(run, fleet, "--rate", "inf", "--num", "2", "--prompt-tokens", "5", "--save", str(saved))
    assert report["completed"] == 2
    prompts = [body["prompt"] for path, body in fleet.asked if path == "POST /v1/completions"]
    _, report = bench(run, fleet, "--rate", "inf", "--prompts-file", str(saved))
    assert report["completed"] == 2
    assert sorted(body["prompt"] for path, body in fleet.asked[-2:]) == sorted(prompts)
    fleet.pieces = ("ab", "cd", "e")
    _, report = bench(run, fleet, "--rate", "inf", "--prompts-file", str(saved))
    assert report["wrong"] == 2


def test_requests_ask_for_what_was_said(run, fleet: Fake):
    bench(run, fleet, "--rate", "inf", "--num", "4", "--prompt-tokens", "6-9", "--classes", "chat", "--seed", "3")
    bodies = [body for path, body in fleet.asked if path == "POST /v1/completions"]
    assert all(6 <= len(body["prompt"]) <= 9 for body in bodies)
    assert all(body["max_tokens"] == 3 and body["ignore_eos"] and body["stream"] for body in bodies)
    assert all(body["model"] == "tiny" and body["temperature"] == 0.0 for body in bodies)
    assert fleet.headers[-1]["x-phaseplane-class"] == "chat"
    before = sorted(body["prompt"] for body in bodies)
    bench(run, fleet, "--rate", "inf", "--num", "4", "--prompt-tokens", "6-9", "--seed", "3")
    assert sorted(body["prompt"] for path, body in fleet.asked[-4:]) == before


def test_long_prompts_are_shortened_to_the_context_and_it_says_so(run, fleet: Fake):
    fleet.max_model_len = 20
    ran, report = bench(run, fleet, "--rate", "inf", "--num", "2", "--prompt-tokens", "50")
    assert report["clamped"] == 2
    assert "shortened" in ran.err
    assert len(fleet.asked[-1][1]["prompt"]) == 17


def test_arrivals_do_not_wait_for_answers(run, fleet: Fake):
    fleet.first_delay_s = 0.5
    _, report = bench(run, fleet, "--rate", "40", "--num", "20")
    assert report["wall_s"] < 5.0  # one after the other would take 10
    assert report["ttft_s"]["p99"] < 4.0


def test_ctrl_c_cancels_what_is_in_flight_and_reports(run, fleet: Fake):
    fleet.silent = {1, 2}
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    ran, report = bench(run, fleet, "--rate", "200", "--num", "3")
    timer.join()
    assert ran.code == 130
    assert (report["completed"], report["cancelled"], report["offered"]) == (1, 2, 3)
    assert "interrupted" in ran.err


def test_a_fleet_without_a_model_is_a_sentence(run, fleet: Fake):
    fleet.fleet = a_fleet(models=())
    ran = run("bench", "--url", fleet.url)
    assert ran.code == 1
    assert "serves no model yet" in ran.err


def a_sample(ending: Ending = Ending.COMPLETED, **changes: object) -> Sample:
    sample = Sample(index=0, traffic_class="default", ending=ending, at_s=0.0, lag_s=0.0, ended_s=10.0, ttft_s=0.5,
                    tpot_s=0.1, e2e_s=1.0)  # fmt: skip
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def test_a_cancel_counts_only_after_a_missed_ttft():
    slo: dict[str, Slo | None] = {"default": Slo(ttft_s=1.0, tpot_s=0.2)}
    early = a_sample(Ending.CANCELLED, ttft_s=None, e2e_s=0.5)
    late = a_sample(Ending.CANCELLED, ttft_s=None, e2e_s=1.5)
    assert summarize([a_sample(), early], slo, 0).attainment == 1.0
    assert summarize([a_sample(), late], slo, 0).attainment == 0.5


def test_one_token_passes_any_tpot_and_e2e_is_an_objective_when_set():
    sample = a_sample(tpot_s=None)
    assert summarize([sample], {"default": Slo(ttft_s=1.0, tpot_s=1e-9)}, 0).good == 1
    assert summarize([sample], {"default": Slo(ttft_s=1.0, tpot_s=1.0, e2e_s=0.9)}, 0).good == 0


def test_a_class_without_objectives_is_left_out():
    samples = [a_sample(), a_sample(traffic_class="batch", ttft_s=99.0)]
    report = summarize(samples, {"default": Slo(ttft_s=1.0, tpot_s=0.2), "batch": None}, 0)
    assert report.attainment == 1.0
    assert report.goodput_per_s == pytest.approx(0.1)
    assert [view.name for view in report.classes] == ["batch", "default"]
    assert report.classes[0].attainment is None


def test_nothing_sent_is_no_nan():
    report = summarize([], {}, 0)
    assert (report.offered, report.wall_s, report.throughput_per_s) == (0, 0.0, 0.0)
    assert report.ttft_s.p50 is None


def test_percentiles_are_exact():
    values = quantiles([float(i) for i in range(101)])
    assert (values.p50, values.p90, values.p99) == (50.0, 90.0, 99.0)
    assert quantiles([None]).p50 is None


def test_objectives_and_classes_parse():
    slos = parse_slos(["ttft:2,tpot:0.2", "chat=ttft:1,tpot:0.1,e2e:9"])
    assert slos[""] == Slo(ttft_s=2.0, tpot_s=0.2)
    assert slos["chat"] == Slo(ttft_s=1.0, tpot_s=0.1, e2e_s=9.0)
    assert parse_classes("chat:0.7, batch") == (("chat", 0.7), ("batch", 1.0))


def test_a_tokenizer_with_too_few_tokens_is_refused():
    with pytest.raises(Exception, match="--prompts-file"):
        PromptMaker([1, 2, 1], 0)


class Pieces:
    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks

    async def iter_any(self):
        for chunk in self._chunks:
            yield chunk


def test_events_survive_any_cut():
    text = b": hi\n\nid: 3\ndata: a\r\ndata: b\r\n\r\ndata:c\n\ndata: lost"

    async def read(size: int) -> list[tuple[str, bytes]]:
        cut = [text[i : i + size] for i in range(0, len(text), size)]
        return [(event.id, event.data) async for event in read_events(Pieces(*cut))]

    for size in (1, 2, 3, 7, 1000):
        assert asyncio.run(read(size)) == [("3", b"a\nb"), ("3", b"c")]
