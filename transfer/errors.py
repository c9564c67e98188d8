"""One tree of errors. A remote error says whether the thing may have happened.

PhaseplaneError
├── InvalidValue            a value from outside is wrong; the sentence names it and what to do
│   ├── ConfigError         a setting (file, environment or flag) is unknown or wrong
│   └── ProtocolError       bytes from a peer are not a message we know; the peer is at fault
├── IllegalTransition       a state machine was asked for a move that is not in its table
├── Overloaded              refused before any work; `retry_after_s` says when to try again
├── RemoteError
│   ├── Definite            it did not happen (refused, unreachable before sending)
│   │   ├── Refused         the peer said no, in a sentence
│   │   └── MailboxFull     the bounded mailbox had no room
│   └── Indefinite          it may have happened (deadline passed, peer died after sending)
│       ├── DeadlinePassed
│       └── PeerLost
├── KvError
│   ├── KvCorrupt           a checksum, header or generation did not match; never served
│   └── KvTransferFailed    a stream ended before its commit was acknowledged
├── JobFailed               an engine that batches by itself cannot serve this one request; others go on
├── StepAbandoned           a step ended before it sampled, harmlessly: KV it waited for will not come
└── EngineFailed            the engine cannot go on; its instance must be replaced
"""

from __future__ import annotations


class PhaseplaneError(Exception):
    """Root. `str(error)` is one sentence for a person: what failed, which value, what to do."""


class InvalidValue(PhaseplaneError, ValueError):
    pass


class ConfigError(InvalidValue):
    pass


class ProtocolError(InvalidValue):
    pass


class IllegalTransition(PhaseplaneError):
    """An illegal move, with the object's history so that the report is a replay."""

    def __init__(self, subject: str, state: str, event: str, history: tuple[str, ...] = ()) -> None:
        self.subject, self.state, self.event, self.history = subject, state, event, history
        past = " -> ".join(history) or "none"
        super().__init__(f"{subject} in state {state} cannot take {event}; its history: {past}")


class Overloaded(PhaseplaneError):
    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class RemoteError(PhaseplaneError):
    pass


class Definite(RemoteError):
    pass


class Refused(Definite):
    pass


class MailboxFull(Definite):
    pass


class Indefinite(RemoteError):
    pass


class DeadlinePassed(Indefinite):
    pass


class PeerLost(Indefinite):
    pass


class KvError(PhaseplaneError):
    pass


class KvCorrupt(KvError):
    pass


class KvTransferFailed(KvError):
    pass


class JobFailed(PhaseplaneError):
    pass


class StepAbandoned(PhaseplaneError):
    pass


class EngineFailed(PhaseplaneError):
    pass
