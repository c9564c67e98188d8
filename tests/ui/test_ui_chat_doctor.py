"""Chat (one question and a conversation) and doctor (each finding, and its exit status)."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import sys
import threading

import pytest
from ui_fakes import Fake, eventually

from ui import doctor
from ui.bench import Bench, BenchOptions
from ui.chat import Conversation, Turn
from ui.client import FleetClient
from ui.workload import Load


def test_a_question_streams_its_answer_and_its_times(run, fleet: Fake):
    fleet.gap_s = 0.02
    ran = run("chat", "hello", "--url", fleet.url, "--max-tokens", "3", "--system", "Be brief.")
    assert ran.code == 0
    assert ran.out == "abcdef\n"
    assert "TTFT" in ran.err
    assert "TPOT" in ran.err
    assert f"phaseplane why cmpl-1 --url {fleet.url}" in ran.err
    body = fleet.asked[-1][1]
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert body["max_tokens"] == 3


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_last_token_counts_in_tpot_also_when_it_has_no_text(fleet: Fake, is_chat: bool):
    """Three tokens, 0.1 s apart, the last of which only ends the answer: (t3 - t1) / 2."""
    fleet.gap_s, fleet.pieces = 0.1, ("ab", "cd", "")

    async def talk() -> float | None:
        async with FleetClient(fleet.url) as client:
            if is_chat:
                return (await Conversation(client, "tiny").ask("one", lambda _: None)).tpot_s
            load = Load(rate=100.0, num=1, duration_s=None, prompt_tokens=(4, 4), output_tokens=(3, 3))
            report = await Bench(client, BenchOptions(load, "tiny")).run()
            return report.tpot_s.p50

    tpot_s = asyncio.run(talk())
    assert tpot_s is not None
    assert 0.09 < tpot_s < 0.2


def test_an_answer_that_is_stopped_tells_what_came(fleet: Fake):
    fleet.gap_s, fleet.pieces = 0.2, ("ab", "cd", "ef", "gh", "ij")

    async def talk() -> Turn:
        async with FleetClient(fleet.url) as client:
            arrived: list[str] = []

            def write(text: str) -> None:
                arrived.append(text)
                if len(arrived) == 3:
                    task.cancel()

            task = asyncio.ensure_future(Conversation(client, "tiny").ask("one", write))
            return await task

    turn = asyncio.run(talk())
    assert (turn.stopped, turn.text, turn.output_tokens) == (True, "abcdef", 3)
    assert turn.tpot_s is not None
    assert "TPOT" in turn.summary()


def test_a_question_can_be_piped(run, fleet: Fake, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("what?\n"))
    assert run("chat", "--url", fleet.url).out == "abcdef\n"
    assert fleet.asked[-1][1]["messages"] == [{"role": "user", "content": "what?"}]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    ran = run("chat", "--url", fleet.url)
    assert ran.code == 1
    assert "`phaseplane chat QUESTION`" in ran.err


def test_an_unknown_model_and_a_broken_answer_are_sentences(run, fleet: Fake):
    ran = run("chat", "hi", "--url", fleet.url, "--model", "other")
    assert ran.code == 1
    assert "use --model tiny" in ran.err
    fleet.broken = {0}
    ran = run("chat", "hi", "--url", fleet.url)
    assert ran.code == 1
    assert "the decode instance is lost" in ran.err
    fleet.statuses = {1: 429}
    ran = run("chat", "hi", "--url", fleet.url)
    assert ran.code == 1
    assert "too much" in ran.err


def test_history_holds_both_sides_and_forgets_a_failed_question(fleet: Fake):
    async def talk() -> list[dict[str, str]]:
        async with FleetClient(fleet.url) as client:
            conversation = Conversation(client, "tiny")
            await conversation.ask("one", lambda _: None)
            fleet.statuses = {1: 500}
            with pytest.raises(Exception, match="too much"):
                await conversation.ask("two", lambda _: None)
            await conversation.ask("three", lambda _: None)
            return conversation.messages

    assert [m["content"] for m in asyncio.run(talk())] == ["one", "abcdef", "three", "abcdef"]


def test_ctrl_c_stops_the_answer_on_the_fleet_too(run, fleet: Fake):
    fleet.silent = {0}
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    ran = run("chat", "hi", "--url", fleet.url)
    timer.join()
    assert ran.code == 130
    assert "stopped" in ran.err
    assert eventually(lambda: fleet.num_closed_by_client == 1)


def test_a_conversation_runs_until_quit(run, fleet: Fake, monkeypatch):
    lines = iter(["", "one", "two", "/quit", "never asked"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    ran = run("chat", "--url", fleet.url)
    assert ran.code == 0
    assert ran.out.count("abcdef") == 2
    assert [m["content"] for m in fleet.asked[-1][1]["messages"]] == ["one", "abcdef", "two"]


def test_doctor_finds_a_running_fleet(run, fleet: Fake, tmp_path, monkeypatch):
    monkeypatch.setenv("PHASEPLANE_HOME", str(tmp_path))
    ran = run("doctor", "--url", fleet.url, "--state", str(tmp_path / "state"), "--json")
    findings = {f["name"]: f for f in json.loads(ran.out)}
    assert ran.code == 0
    assert findings["fleet"]["level"] == "ok"
    assert "1P1D" in findings["fleet"]["text"]
    assert findings["model"]["level"] == "warn"
    assert findings["model"]["mend"] == "phaseplane pull smollm2-135m"
    assert not (tmp_path / "state").exists()


def test_doctor_fails_when_the_port_is_taken_by_something_else(run, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        def hang_up() -> None:
            for _ in range(2):  # an HTTP client tries a dropped GET once more
                taken.accept()[0].close()

        closer = threading.Thread(target=hang_up)
        closer.start()
        ran = run("doctor", "--url", f"http://127.0.0.1:{port}", "--state", str(tmp_path))
        closer.join()
    assert ran.code == 1
    assert f"{port} is taken" in ran.out
    assert f"phaseplane up --port {port + 1}" in ran.out


def test_each_lack_has_a_remedy(tmp_path, monkeypatch):
    assert doctor.check_python((3, 9, 1)).level == "fail"
    assert doctor.check_modules("packages", {"no_such_module": "no-such"}, "pip install x", "fail").level == "fail"
    assert doctor.check_memory(1e9).level == "warn"
    assert doctor.check_shm(tmp_path / "shm").level == "warn"
    assert doctor.check_cores(1).level == "warn"
    assert doctor.check_files(100).level == "warn"
    (tmp_path / "file").write_text("")
    assert doctor.check_writable("state", tmp_path / "file" / "below", "--state DIR").level == "fail"
    lacks = [doctor.check_python((3, 9)), doctor.check_memory(1e9), doctor.check_shm(tmp_path / "shm")]
    assert all(finding.mend for finding in lacks)
    assert doctor.check_python((3, 12, 0)).level == doctor.check_memory(9e9).level == "ok"
