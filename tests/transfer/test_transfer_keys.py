"""Key files: made once, private, never overwritten, refused when they are something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer.errors import ConfigError
from transfer.keys import DATA_KEY, DATA_KEY_BYTES, load_data_key, main, make_keys


def test_keys_are_private_distinct_and_never_overwritten(tmp_path: Path) -> None:
    told = make_keys(tmp_path / "one")
    assert "curve_allowed" in told
    for path in (tmp_path / "one").iterdir():
        assert path.stat().st_mode & 0o077 == 0
    first = load_data_key(tmp_path / "one" / DATA_KEY)
    assert len(first) == DATA_KEY_BYTES
    with pytest.raises(ConfigError, match="already"):
        make_keys(tmp_path / "one")
    make_keys(tmp_path / "two")
    assert load_data_key(tmp_path / "two" / DATA_KEY) != first


def test_the_secret_is_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "k")]) == 0
    said = capsys.readouterr().out
    for path in (tmp_path / "k").iterdir():
        for word in path.read_text().replace('"', " ").split():
            if len(word) >= 40:
                assert word not in said or f'public = "{word}"' in path.read_text()
    assert main([str(tmp_path / "k")]) == 1
    assert "already" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "zz", "00" * 31, "é" * 64])
def test_what_is_no_data_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "k").write_text(text)
    with pytest.raises(ConfigError, match="phaseplane keys"):
        load_data_key(tmp_path / "k")
