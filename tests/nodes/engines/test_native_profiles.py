"""What `calibrate` fits is kept, found by engines it holds for and by no others, and not believed when it is wrong."""

from __future__ import annotations

import itertools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers
from native_helpers import save_tiny_model

from nodes import calibrate
from nodes.engines.native.engine import NativeEngine
from nodes.engines.native.grid import DECODES, spread_evenly, steps_within
from nodes.profiles import load_profile, profile_path, save_profile


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHASEPLANE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory, transformers.LlamaConfig, max_position_embeddings=4096)
    return directory


def make_engine(directory: Path, **options: Any) -> NativeEngine:
    return NativeEngine(
        directory, **{"dtype": "float32", "device": "cpu", "kv_bytes": 1 << 24, "num_threads": 1} | options
    )


@pytest.mark.slow
async def test_what_is_fitted_is_used_by_engines_of_the_same_kind_only(
    home: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--model", str(tiny_dir), "--dtype", "float32", "--device", "cpu", "--threads", "1", "--seconds", "0.01"]
    report = await calibrate.calibrate(calibrate._parser().parse_args([*options, "--kv-gib", "0.02"]))
    assert Path(report.path).parent == home / "profiles"
    assert report.num_timed >= 3 * report.num_steps
    assert report.num_steps > len(DECODES)
    assert report.held_out >= 0

    engine = make_engine(tiny_dir)
    kept = load_profile(engine.profile_key)
    assert kept is not None
    assert kept.latency.provenance == "fitted"
    assert kept.latency.error == report.held_out
    assert kept.latency.provenance_at(8, 8 * 300, 8) == "fitted"
    assert kept.latency.provenance_at(64, 64 * 300, 64) == "extrapolated"
    await engine.close()

    for changes in ({"num_threads": 2}, {"calibrated": False}, {"measure": False}):
        other = make_engine(tiny_dir, **changes)
        assert other.latency.provenance != "fitted", changes
        await other.close()

    wrong = msgspec.structs.replace(kept, latency=kept.latency.scaled(100.0))
    save_profile(wrong)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(tiny_dir)
    await engine.close()
    assert engine.latency.provenance == "measured"
    assert "run `phaseplane calibrate` again" in caplog.text


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "nodes.fitting", raising=False)
    monkeypatch.delitem(sys.modules, "nodes.engines.native.grid", raising=False)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert calibrate.main([]) == 1
    assert "phaseplane[native,plan]" in capsys.readouterr().err


def test_a_profile_that_cannot_be_read_counts_as_none(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    from nodes.profiles import ProfileKey

    key = ProfileKey(model="m", dtype="float32", device="d", num_threads=1, software="s")
    assert load_profile(key) is None
    path = profile_path(key)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"key": {}}), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert load_profile(key) is None
    assert "phaseplane calibrate" in caplog.text


def test_steps_take_turns_over_the_whole_time() -> None:
    order = spread_evenly([2, 4, 1])
    assert order == [1, 0, 1, 2, 1, 0, 1]
    order = spread_evenly([3, 25])
    assert (order.count(0), order.count(1)) == (3, 25)
    gaps = [after - before for before, after in itertools.pairwise([-1, *(i for i, x in enumerate(order) if x == 0)])]
    assert max(gaps) <= 10


def test_steps_stay_within_the_memory_and_context_there_is() -> None:
    for num_blocks, max_context in ((64, 8192), (4096, 700), (4096, 8192)):
        room = min(num_blocks * 16, max_context)
        steps = steps_within(num_blocks, 16, max_context)
        ends = [chunk.start + len(chunk.tokens) for step in steps for chunk in step.chunks]
        blocks = [block for step in steps for chunk in step.chunks for block in chunk.block_table]
        assert steps
        assert max(ends) <= room
        assert max(blocks) < num_blocks
    for step in steps_within(16 * 65, 16, 8192):
        if len(step.chunks) <= 16 and step.chunks[0].start == 1024:
            read = [block for chunk in step.chunks if chunk.start == 1024 for block in chunk.block_table]
            assert len(set(read)) > 0.9 * len(read), "sequences read KV of their own, not what is in a cache already"
