"""Who may talk beyond loopback, and that keys are kept and checked."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from transfer.errors import ConfigError
from transfer.wire.curve import CurveKeys, check_bind, generate_keys, load_keys, save_keys
from transfer.wire.messages import CONTROL, Abort
from transfer.wire.zmq import DealerEndpoint, RouterEndpoint

KEYS = generate_keys()


class Seen:
    """What an endpoint saw, and its callbacks."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.numbers: list[int] = []
        self.complaints: list[str] = []
        self.callbacks: dict[str, Any] = {
            "on_message": lambda peer, message: self.numbers.append(message.generation),
            "on_peer": lambda peer, event: self.events.append(event.value),
            "on_bad": lambda peer, error: self.complaints.append(str(error)),
        }


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited in vain")


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:5555", "tcp://127.8.9.1:1", "tcp://[::1]:5555", "tcp://localhost:0"]
)
def test_loopback_needs_no_keys(address: str) -> None:
    check_bind(address, None)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.7:1", "tcp://node7:5555"])
def test_beyond_loopback_needs_keys(address: str) -> None:
    with pytest.raises(ConfigError, match="reachable by others"):
        check_bind(address, None)
    check_bind(address, KEYS)
    seen = Seen()
    with pytest.raises(ConfigError, match="reachable by others"):
        RouterEndpoint(address, **seen.callbacks)
    with pytest.raises(ConfigError, match="reachable by others"):
        DealerEndpoint(address, "d1", **seen.callbacks)


@pytest.mark.parametrize("address", ["", "127.0.0.1:5555", "tcp://127.0.0.1", "ipc:///tmp/x", "tcp://:1", "tcp://a:b"])
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must look like"):
        check_bind(address, KEYS)


def test_keys_are_kept_for_their_owner_and_survive(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    save_keys(KEYS, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_keys(path) == KEYS
    assert load_keys(path, server_public=KEYS.public).server_public == KEYS.public
    assert KEYS.secret not in repr(KEYS)
    with pytest.raises(ConfigError, match="cannot write"):
        save_keys(KEYS, path)


def test_a_public_key_is_never_taken_for_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    flag, good = zmq.curve_keypair(), zmq.curve_keypair()
    drawn = iter([(b"-" + flag[0][1:], flag[1]), (b"x" + good[0][1:], good[1])])
    monkeypatch.setattr("transfer.wire.curve.zmq.curve_keypair", lambda: next(drawn))
    assert generate_keys().public == "x" + good[0].decode()[1:]


@pytest.mark.parametrize("text", ["", "public = 1\nsecret = 2\n", "not toml", 'public = "short"\nsecret = "short"\n'])
def test_a_damaged_key_file_is_a_clear_error_without_the_secret(tmp_path: Path, text: str) -> None:
    path = tmp_path / "node.key"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"key") as caught:
        load_keys(path)
    assert "short" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read the key file"):
        load_keys(tmp_path / "missing")


def test_keys_of_the_wrong_form_are_refused() -> None:
    with pytest.raises(ConfigError, match="allowed CURVE key"):
        CurveKeys(public=KEYS.public, secret=KEYS.secret, allowed=frozenset({"x"}))
    client = CurveKeys(public=KEYS.public, secret=KEYS.secret)
    seen = Seen()

    async def connect() -> None:
        dealer = DealerEndpoint("tcp://127.0.0.1:1", "d1", **seen.callbacks, curve=client)
        with pytest.raises(ConfigError, match="server_public"):
            await dealer.start()

    asyncio.run(connect())


@pytest.mark.parametrize("listed", [True, False])
def test_only_the_right_keys_get_in(listed: bool) -> None:
    mine, stranger = generate_keys(), generate_keys()
    allowed = frozenset({mine.public}) if listed else None

    def client(keys: CurveKeys, server: CurveKeys) -> CurveKeys:
        return CurveKeys(public=keys.public, secret=keys.secret, server_public=server.public)

    async def run() -> None:
        at_router = Seen()
        server = CurveKeys(public=KEYS.public, secret=KEYS.secret, allowed=allowed)
        router = RouterEndpoint("tcp://127.0.0.1:0", **at_router.callbacks, curve=server)
        await router.start()
        attempts: dict[str, CurveKeys | None] = {
            "mine": client(mine, KEYS),
            "stranger": client(stranger, KEYS),
            "wrong-server-key": client(mine, stranger),
            "no-keys": None,
        }
        seen = {name: Seen() for name in attempts}
        dealers = [
            DealerEndpoint(router.address, name, **seen[name].callbacks, curve=keys) for name, keys in attempts.items()
        ]
        for dealer in dealers:
            await dealer.start()
        try:
            await until(lambda: seen["mine"].events == ["connected"])
            dealers[0].send(CONTROL, Abort(request_id="r", generation=7, reason=""))
            await until(lambda: at_router.numbers == [7] and (not listed or bool(seen["stranger"].complaints)))
            await asyncio.sleep(0.5)
            assert router.peers == (("mine",) if listed else ("mine", "stranger"))
            assert (seen["stranger"].events == []) == listed
            assert seen["wrong-server-key"].events == seen["no-keys"].events == []
            if listed:
                assert "refused the keys of stranger; check the CURVE key files" in seen["stranger"].complaints[0]
        finally:
            for dealer in dealers:
                await dealer.close()
            await router.close()

    asyncio.run(run())
