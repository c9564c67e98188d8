"""The models this control plane serves: their tokenizers, and which nodes have the same ones."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.config import EMULATED_MAX_CONTEXT, Model
from controlplane.gateway.tokenizer import BYTE_VOCABULARY, ByteTokenizer, HfTokenizer, TextTokenizer
from transfer.errors import ConfigError
from transfer.models import model_dir, read_identity
from transfer.terms import ModelIdentity, Struct
from transfer.wire.messages import Hello


class Served(Struct, frozen=True):
    """name: as nodes call it. identity: None for an emulated model, whose name and vocabulary are all there is."""

    name: str
    max_context: int
    identity: ModelIdentity | None

    def why_refused(self, hello: Hello) -> str | None:
        """A sentence for a node that serves something else; None for one that may join. Pools hold no model."""
        model = hello.model
        if model is None:
            return None
        node = f"{hello.instance_id} serves model {model.name}"
        if model.max_context < self.max_context and hello.shares_kv:
            return f"{node} with a context of {model.max_context} tokens; set model.max_context to it or less"
        if self.identity is None:
            expected = BYTE_VOCABULARY
            if model.vocab_size != expected:
                return f"{node} with {model.vocab_size} token ids, but the emulated one has {expected}"
            return None
        # Whose weights they are that a server serves which keeps KV to itself, nobody can tell.
        for field in ("revision", "tokenizer", "vocab_size") if hello.shares_kv else ("tokenizer", "vocab_size"):
            if getattr(model, field) != getattr(self.identity, field):
                return f"{node}, but its {field} differs from the control plane's; use the same model files on both"
        return None


def why_refused(models: Sequence[Served], hello: Hello) -> str | None:
    """A sentence for a node that serves none of these, or another version of one; None for one that may join."""
    if hello.model is None:
        return None
    for served in models:
        if served.name == hello.model.name:
            return served.why_refused(hello)
    names = " and ".join(served.name for served in models)
    return (f"{hello.instance_id} serves model {hello.model.name}, but this control plane serves {names}; start the "
            f"node with --model {models[0].name}, or add its model to the configuration")  # fmt: skip


def load_model(config: Model) -> tuple[Served, TextTokenizer]:
    """Reads the tokenizer, no weights. Raises InvalidValue naming the next command when the model is not there."""
    if config.engine == "emulated":
        longest = config.max_context or EMULATED_MAX_CONTEXT
        return Served(name=config.name, max_context=longest, identity=None), ByteTokenizer(longest)
    directory = model_dir(config.name)
    identity = read_identity(directory)
    tokenizer = HfTokenizer(directory)
    if config.max_context is not None:
        if config.max_context > identity.max_context:
            raise ConfigError(
                f"model.max_context {config.max_context} is over the {identity.max_context} tokens of {identity.name}"
            )
        tokenizer.max_context = config.max_context
    served = Served(name=identity.name, max_context=tokenizer.max_context, identity=identity)
    return served, tokenizer
