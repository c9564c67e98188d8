"""CURVE keys for control traffic beyond loopback, and the rule that such traffic must have them.

Key files are TOML, readable by their owner alone: `public`, `secret`. Keys are ZeroMQ's Z85 text.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from transfer.errors import ConfigError
from transfer.wire.sockets import Pump, ZmqContext, ZmqSocket

_Z85_CHARS = 40
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"phaseplane"


@dataclass(frozen=True)
class CurveKeys:
    """One end's key pair, Z85.

    server_public: on a dealer, the router's public key. allowed: on a router, the public keys of the
    dealers it lets in; None lets in whoever knows the router's public key, so treat that one as a secret.
    """

    public: str
    secret: str = field(repr=False)
    server_public: str | None = None
    allowed: frozenset[str] | None = None

    def __post_init__(self) -> None:
        for name in ("public", "secret", "server_public"):
            key = getattr(self, name)
            if key is not None and not _is_key(key):
                raise ConfigError(f"the CURVE key {name} must be {_Z85_CHARS} characters of Z85, got {len(key)}")
        for key in sorted(self.allowed or ()):
            if not _is_key(key):
                raise ConfigError(f"allowed CURVE key {key!r} is not {_Z85_CHARS} characters of Z85")

    def guard(self, socket: ZmqSocket) -> None:
        """Make `socket` a CURVE server (the router's end)."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())
        if self.allowed is not None:
            socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)

    def unlock(self, socket: ZmqSocket) -> None:
        """Make `socket` a CURVE client. Raises ConfigError without server_public."""
        if self.server_public is None:
            raise ConfigError("connecting with CURVE needs the control plane's public key; set server_public")
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())


def generate_keys() -> CurveKeys:
    """A new key pair. The public one is given to programs, which take what begins with a dash for a flag of its own."""
    public, secret = zmq.curve_keypair()
    while public.startswith(b"-"):
        public, secret = zmq.curve_keypair()
    return CurveKeys(public=public.decode(), secret=secret.decode())


def save_keys(keys: CurveKeys, path: Path) -> None:
    """Write a key pair to a new file of mode 0600. Raises ConfigError when it exists or cannot be written."""
    # Z85 has neither quotes nor backslashes, so a key is a TOML string as it is.
    text = f'public = "{keys.public}"\nsecret = "{keys.secret}"\n'
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write the key file {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def load_keys(path: Path, *, server_public: str | None = None, allowed: frozenset[str] | None = None) -> CurveKeys:
    """Read a key pair that save_keys wrote. Raises ConfigError, which never shows the secret."""
    try:
        table = tomllib.loads(path.read_text())
        public, secret = table["public"], table["secret"]
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError):
        raise ConfigError(f"{path} is not a key file; it needs the keys public and secret") from None
    if set(table) != {"public", "secret"} or not isinstance(public, str) or not isinstance(secret, str):
        raise ConfigError(f"{path} is not a key file; it needs the keys public and secret and nothing else")
    return CurveKeys(public=public, secret=secret, server_public=server_public, allowed=allowed)


def check_bind(address: str, curve: CurveKeys | None) -> None:
    """Raises ConfigError for an address that is not tcp://host:port, and beyond loopback without CURVE.

    A host name other than localhost counts as beyond loopback: what it resolves to may change.
    """
    try:
        parts = urlsplit(address)
        valid = parts.scheme == "tcp" and bool(parts.hostname) and parts.port is not None
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"address {address!r} must look like tcp://127.0.0.1:5555")
    if curve is None and not _is_loopback(parts.hostname or ""):
        raise ConfigError(f"{address} is reachable by others: give CURVE keys, or use tcp://127.0.0.1")


class ZapHandler:
    """Lets in the dealers whose public key is listed. One per context (ZeroMQ asks at a fixed inproc address)."""

    def __init__(self, context: ZmqContext, allowed: frozenset[str]) -> None:
        self._allowed = allowed
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ADDRESS)
        self._pump = Pump(self._socket, self._take)

    def close(self) -> None:
        self._pump.close()
        self._socket.close()

    def _take(self) -> None:
        version, request_id, domain, _address, _identity, mechanism, *credentials = self._socket.recv_multipart(
            zmq.NOBLOCK
        )
        known = (
            (version, domain, mechanism) == (b"1.0", _ZAP_DOMAIN, b"CURVE")
            and len(credentials) == 1
            and z85.encode(credentials[0]).decode() in self._allowed
        )
        status = [b"200", b"OK"] if known else [b"400", b"this public key is not allowed"]
        self._socket.send_multipart([b"1.0", request_id, *status, b"", b""])
        self._pump.kick()


def _is_key(key: str) -> bool:
    try:
        return len(key) == _Z85_CHARS and len(z85.decode(key)) == _Z85_CHARS * 4 // 5
    except (KeyError, ValueError, UnicodeEncodeError):
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
