"""Chat messages to prompt text by a model's own Jinja template, in a sandbox that cannot change or reach anything."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from transfer.errors import ConfigError, InvalidValue

_RESERVED = frozenset({"messages", "add_generation_prompt", "raise_exception", "strftime_now"})


class ChatTemplate:
    """Renders as Hugging Face's apply_chat_template does. Raises ConfigError for a template that does not parse."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: bos_token, eos_token and the like, as the template names them."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template does not parse at line {error.lineno}: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None) -> str:
        """The prompt, ending where the assistant begins. Raises InvalidValue when the template refuses."""
        if extra and (taken := sorted(_RESERVED & extra.keys())):
            raise InvalidValue(f"chat_template_kwargs may not set {taken[0]}; leave it out")
        values = {**self._special_tokens, **(extra or {})}
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **values)
        except (jinja2.TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError) as error:
            raise InvalidValue(f"the model's chat template refuses these messages: {error}") from None


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
