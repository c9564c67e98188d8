"""`phaseplane bench kv`: what its lines say, that ours is measured for real, that a missing peer is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nodes.benches.kv import main
from nodes.benches.measuring import Line, Peer, PeerFailed, alternate, line

ROOT = Path(__file__).parents[3]
KEYS = ["name", "ours_gb_per_s", "peer", "peer_gb_per_s", "ratio"]


def bench(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nodes.benches.kv", "--rounds=1", *argv], cwd=ROOT, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip


async def test_contenders_take_turns_and_medians_count_without_the_first_round() -> None:
    order: list[str] = []
    ours = iter([100.0, 1.0, 3.0, 2.0])

    async def our_way() -> dict[str, float]:
        order.append("ours")
        return {"write": next(ours), "read": 5.0}

    async def their_way() -> dict[str, float]:
        order.append("theirs")
        return {"write": 4.0}

    taken = await alternate(3, {"ours": our_way, "theirs": their_way})
    assert taken == {"ours": {"write": 2.0, "read": 5.0}, "theirs": {"write": 4.0}}
    assert order == ["ours", "theirs"] * 4


def test_a_line_is_ours_over_the_peers() -> None:
    assert line("x", 3.0, "memcpy", 4.0) == Line("x", 3.0, "memcpy", 4.0, 0.75)
    assert line("x", 3.0, "memcpy") == Line("x", 3.0, None, None, None)
    assert list(json.loads(line("x", 3.0).json())) == KEYS
    assert "0.75x" in line("x", 3.0, "memcpy", 4.0).text()


def test_the_ssd_tier_is_measured_beside_a_plain_file_and_leaves_nothing(tmp_path: Path) -> None:
    ran = bench("--only=ssd", "--json", f"--directory={tmp_path}")
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(text) for text in ran.stdout.splitlines()]
    assert [(one["name"], one["peer"]) for one in lines] == [("ssd_write", "plain file"), ("ssd_read", "plain file")]
    assert all(one["ours_gb_per_s"] > 0 and one["peer_gb_per_s"] > 0 and list(one) == KEYS for one in lines)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_transfer_and_pool_are_measured_and_peers_that_do_not_start_are_told() -> None:
    ran = bench("--only=tcp,shm,pool", "--json", f"--peers-python={sys.executable}")
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(text) for text in ran.stdout.splitlines()]
    names = {one["name"] for one in lines}
    assert {"tcp_push", "shm_push", "shm_fetch", "pool_round_trip", "pool_tcp_in_place_get"} <= names
    assert {one["peer"] for one in lines} == {"blocking socket", "memcpy", None}
    assert "note: mooncake-engine ended early" in ran.stderr


async def test_a_peer_whose_python_lacks_it_fails_with_what_to_try() -> None:
    with pytest.raises(PeerFailed, match=r"nixl ended early; try it alone: .*peers\.py nixl"):
        await Peer(Path(sys.executable), "nixl", 1 << 20).__aenter__()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--only=tcp,udp"], "--only names 'udp'"),
        (["--rounds=0"], "--rounds must be at least 1"),
        (["--peers-python=/nowhere/python"], "--peers-python /nowhere/python cannot be run"),
        (["--directory=/nowhere"], "--directory /nowhere is not a folder"),
    ],
)
def test_wrong_options_are_one_sentence(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
