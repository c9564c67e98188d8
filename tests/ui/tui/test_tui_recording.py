"""A session that was recorded shows again what it showed; what is no recording is refused in a sentence."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import msgspec
import pytest
from top_fakes import PEN, START_S, TopFake, frames, records, shown, until
from ui_fakes import a_kv_detail, serving

from transfer.api import LiveFrame
from ui.client import FleetClient
from ui.errors import CliError
from ui.tui.app import TopApp
from ui.tui.model import Picture
from ui.tui.recording import FRAME, Recorder, load
from ui.tui.session import LiveSession, ReplaySession

WORDS = PEN.words


def recorded(path: Path, num: int = 400) -> None:
    recorder = Recorder(path, START_S, WORDS)
    for frame in frames(num):
        recorder.put(frame.at_s, FRAME, frame)
    recorder.put(START_S + 50, "requests", records())
    recorder.put(START_S + 60, "kv", a_kv_detail())
    recorder.put(START_S + 60, "of a later version", {"x": 1})
    recorder.close()


def test_what_was_recorded_is_what_is_replayed(tmp_path: Path) -> None:
    recorded(tmp_path / "x.rec")
    session = ReplaySession(load(tmp_path / "x.rec", WORDS), "x.rec")
    then = session.picture(Picture(), START_S + 301)
    assert then.mode == "replay"
    assert then.fleet is not None
    assert then.fleet.instances[0].state == "draining"
    assert list(then.records) == [], "none of them had ended by then"
    assert [record.request_id for record in session.picture(Picture(), None).records] == ["cmpl-1", "cmpl-2", "cmpl-3"]
    assert then.kv == a_kv_detail()
    assert not then.may_act
    assert session.picture(Picture(), START_S + 1e9).at_s == START_S + 399
    assert len(session.tape.points.times) == 400


def test_a_recording_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "x.rec"
    recorded(path, 100)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert START_S < (load(path, WORDS).last_s or 0.0) < START_S + 99


def a_frame(at_s: float = START_S, per_s: float = 1.0) -> LiveFrame:
    state = frames(1)[0].state
    assert state is not None
    goodput = msgspec.structs.replace(state.goodput, per_s=per_s)
    return LiveFrame(seq=1, kind="snapshot", at_s=at_s, state=msgspec.structs.replace(state, goodput=goodput))


def stream(*values: object) -> bytes:
    return b"".join(map(msgspec.msgpack.encode, values))


BEGIN = (0.0, "phaseplane", 1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no recording"),
        (b"hello, this is text", "is no recording"),
        (stream((0.0, "phaseplane", 99)), "is no recording of this version"),
        (stream(BEGIN), "holds no frame"),
        (stream(BEGIN, (1.0, "frame", {"seq": "x"})), "damaged"),
        (stream(BEGIN, 7), "damaged"),
        (stream(BEGIN) + b"\xc1", "damaged"),
        (stream(BEGIN, ("x", "kv", a_kv_detail())), "'x' is no moment"),
        (stream(BEGIN, (1.0, "frame", a_frame(at_s=1e300))), "no moment"),
        (stream(BEGIN, (1.0, "frame", a_frame(at_s=math.nan))), "damaged"),
        (stream(BEGIN, (1.0, "frame", a_frame(per_s=math.inf))), "damaged"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.rec"
    path.write_bytes(content)
    with pytest.raises(CliError, match=said):
        load(path, WORDS)


def test_a_full_disk_ends_the_recording_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.rec"
    recorder = Recorder(path, START_S, WORDS)
    recorder.put(START_S, FRAME, a_frame())
    whole, room = recorder._file, 100

    class Full:
        def write(self, data: bytes) -> int:
            nonlocal room
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written, room = whole.write(data[:room]), room - min(room, len(data))
            return written

    monkeypatch.setattr(recorder, "_file", Full())
    recorder.put(START_S + 1, FRAME, a_frame(START_S + 1))
    recorder.put(START_S + 2, FRAME, a_frame(START_S + 2))
    whole.close()
    assert "cannot be written (No space left on device)" in recorder.problem
    assert load(path, WORDS).last_s == START_S


def test_a_moment_in_no_year_is_not_known() -> None:
    assert [PEN.clock(at_s) for at_s in (1e300, -1e300, 0.0)] == ["-", "-", "00:00:00"]


def test_a_recording_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.rec").write_text("precious")
    with pytest.raises(CliError, match="overwrites nothing"):
        Recorder(tmp_path / "x.rec", 0.0, WORDS)
    assert (tmp_path / "x.rec").read_text() == "precious"
    with pytest.raises(CliError, match="cannot be written"):
        Recorder(tmp_path / "none" / "x.rec", 0.0, WORDS)
    with pytest.raises(CliError, match="cannot be read"):
        load(tmp_path / "missing.rec", WORDS)


async def test_a_live_session_records_frames_and_answers(tmp_path: Path) -> None:
    path = tmp_path / "live.rec"
    recorder = Recorder(path, 0.0, WORDS)
    with serving(TopFake()) as fake:
        async with FleetClient(fake.url) as client:
            session = LiveSession(client, recorder)
            app = TopApp(session, PEN, Picture(url=fake.url))
            async with app.run_test(size=(100, 30)) as pilot:
                await until(pilot, lambda: session.tape.answer_at("autopilot", 1e12) is not None)
                await until(pilot, lambda: app.picture.fleet is not None and app.picture.fleet.in_flight > 3)
                assert "tiny" in shown(app)
    recorder.close()
    tape = load(path, WORDS)
    assert tape.state_at(1e12) == session.tape.state_at(1e12)
    assert tape.answer_at("requests", 1e12) == records()
