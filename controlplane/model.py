"""The one model this control plane serves: its tokenizer, and which nodes have the same one."""

from __future__ import annotations

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
        if model.name != self.name:
            return f"{node}, but this control plane serves {self.name}; start the node with --model {self.name}"
        if model.max_context < self.max_context:
            return f"{node} with a context of {model.max_context} tokens; set model.max_context to it or less"
        if self.identity is None:
            expected = BYTE_VOCABULARY
            if model.vocab_size != expected:
                return f"{node} with {model.vocab_size} token ids, but the emulated one has {expected}"
            return None
        for field in ("revision", "tokenizer", "vocab_size"):
            if getattr(model, field) != getattr(self.identity, field):
                return f"{node}, but its {field} differs from the control plane's; use the same model files on both"
        return None


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
