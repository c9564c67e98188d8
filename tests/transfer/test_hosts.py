"""Which names a server on loopback answers to."""

from __future__ import annotations

import pytest

from transfer.hosts import host_name, is_foreign


@pytest.mark.parametrize(("header", "name"), [
    ("LocalHost:80", "localhost"), ("[::1]:8000", "::1"), ("::1", "::1"), ("127.0.0.1", "127.0.0.1"), ("", ""),
])  # fmt: skip
def test_the_name_of_a_host_header(header: str, name: str):
    assert host_name(header) == name


def test_only_loopback_and_what_is_allowed_is_no_stranger():
    assert is_foreign("evil.example:8000", "127.0.0.1")
    assert is_foreign("10.0.0.1", "127.0.0.1")
    assert is_foreign("", "127.0.0.1")
    assert not is_foreign("127.0.0.9:1", "127.0.0.1")
    assert not is_foreign("A.example:8000", "::1", ("a.Example",))
    assert not is_foreign(None, "127.0.0.1")
    assert not is_foreign("evil.example", "10.0.0.1"), "there is a key to ask for"
