"""The salt that separates the KV of tenants is the server's: nothing a client sends reaches it (CVE-2025-46570)."""

from __future__ import annotations

import pytest
from gateway_fakes import Front, front, items

from controlplane.config import Config, Model, Server
from controlplane.core.events import RequestSpec
from controlplane.gateway.auth import salt_of

KEYS = {"alice": "sk-alice-secret", "bob": "sk-bob-secret-1"}
WITH_KEYS = Config(model=Model(name="m", engine="emulated"), server=Server(api_keys=KEYS))
OPEN = Config(model=Model(name="m", engine="emulated"))
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
SALT = "f00d" * 16
FIELDS = (
    "salt",
    "cache_salt",
    "tenant",
    "kv_salt",
    "root",
    "fingerprint",
    "user",
    "prompt_cache_key",
    "safety_identifier",
)
HEADERS = ("X-Salt", "X-Cache-Salt", "X-Tenant", "X-Phaseplane-Salt", "X-Phaseplane-Tenant", "X-Request-Id")


async def ask(f: Front, who: str | None, *, path: str = "/v1/chat/completions", **more: object) -> int:
    headers = {"Authorization": f"Bearer {KEYS[who]}"} if who else {}
    headers |= dict.fromkeys(HEADERS, SALT)
    body = {**(CHAT if "chat" in path else {"model": "m", "prompt": "hello"}), **more}
    async with f.client.post(path, json=body, headers=headers) as response:
        await response.read()
        return response.status


def salts(f: Front) -> list[str]:
    return [spec.salt for spec in f.core.specs.values()]


def replying(f: Front) -> None:
    def reply(spec: RequestSpec) -> list:  # type: ignore[type-arg]
        return items(spec.request_id, "hi")

    f.reply(reply)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_no_field_and_no_header_reaches_the_salt(path: str) -> None:
    async with front(WITH_KEYS) as f:
        replying(f)
        for field in FIELDS:
            assert await ask(f, "alice", path=path, **{field: SALT}) in (200, 400)
        assert await ask(f, "alice", path=path) == 200
        expected = salt_of(WITH_KEYS, "alice")
        assert len(expected) == 64
        assert salts(f)
        assert set(salts(f)) == {expected}
        assert all(spec.tenant == "alice" for spec in f.core.specs.values())


async def test_fields_that_name_a_salt_are_refused_with_a_sentence() -> None:
    async with front(WITH_KEYS) as f:
        for field in ("salt", "cache_salt", "tenant"):
            assert await ask(f, "alice", **{field: SALT}) == 400
        assert salts(f) == []


async def test_tenants_differ_and_one_tenant_is_always_the_same() -> None:
    async with front(WITH_KEYS) as f:
        replying(f)
        for tenant in ("alice", "bob", "alice"):
            assert await ask(f, tenant) == 200
        first, other, again = salts(f)
        assert first == again != other
        assert await ask(f, "alice", n=2) == 200
        assert salts(f)[3:] == [first, first]


async def test_a_new_key_is_a_new_salt_and_it_tells_nothing_of_the_key() -> None:
    changed = Config(model=Model(name="m"), server=Server(api_keys={"alice": "sk-alice-another", "bob": KEYS["alice"]}))
    found = [salt_of(WITH_KEYS, "alice"), salt_of(changed, "alice"), salt_of(changed, "bob"), salt_of(WITH_KEYS, "bob")]
    assert len(set(found)) == 4, "not even the same key under another name gives the same salt"
    assert not any(key in salt for key in KEYS.values() for salt in found)


async def test_without_keys_everybody_is_one_tenant() -> None:
    async with front(OPEN) as f:
        replying(f)
        assert await ask(f, None) == 200
        assert salts(f) == [""]
