"""POST /v1/chat/completions, streamed and not."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from aiohttp import web

from controlplane.gateway import tokenizer as text
from controlplane.gateway.assembler import Piece, token_ids
from controlplane.gateway.bodies import ChatBody, decoder, read, receive
from controlplane.gateway.errors import ApiError, invalid
from controlplane.gateway.generate import Call, Usage, model_of
from controlplane.gateway.logprobs import chat_logprobs
from controlplane.gateway.params import Wanted, chat_messages, check
from controlplane.gateway.service import GATEWAY, ServedModel
from controlplane.gateway.tokenizer import TextTokenizer
from transfer.errors import InvalidValue

_decoder = decoder(ChatBody)
_encode = msgspec.json.Encoder().encode
_ROLE = b'"role":"assistant",'


async def chat_completions(request: web.Request) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    arrived_s = gateway.now()
    body = read(_decoder, await receive(request))
    model = model_of(gateway, body.model)
    wanted = check(body, model.tokenizer.vocab_size)
    prompt = render(model.tokenizer, body)
    call = Call(gateway, model, request, gateway.mint_id("chatcmpl"), wanted, 1)
    call.start([await text.encode(model.tokenizer, prompt, add_special_tokens=False)], arrived_s)
    return await call.answer(ChatFormat(model, call.call_id, wanted.n, wanted))


def render(tokenizer: TextTokenizer, body: ChatBody) -> str:
    """The prompt text. Raises ApiError 400 when the model has no chat template or it refuses."""
    template = tokenizer.template
    if template is None:
        raise invalid("this model has no chat template; use /v1/completions", "messages")
    try:
        return template.render(chat_messages(body.messages), body.chat_template_kwargs)
    except InvalidValue as error:
        raise ApiError(400, str(error), param="messages") from None


class ChatFormat:
    """Chunks are assembled from parts that were encoded once for the call."""

    def __init__(self, model: ServedModel, call_id: str, num_choices: int, wanted: Wanted) -> None:
        self._tokenizer, self._token_ids = model.tokenizer, wanted.token_ids
        self._head = {"id": call_id, "created": int(time.time()), "model": model.served_name}
        head = _encode(self._head | {"object": "chat.completion.chunk"})[:-1]
        self._prefix = [
            b"data: " + head + b',"choices":[{"index":' + str(index).encode() + b',"delta":{'
            for index in range(num_choices)
        ]
        self._plain_end = b'},"logprobs":null,"finish_reason":null}]' + (
            b',"usage":null' if wanted.include_usage else b""
        )
        self._plain_end += b"}\n\n"
        self._usage_head = b"data: " + head + b',"choices":[],"usage":'
        self._usage_null = b',"usage":null' if wanted.include_usage else b""
        self._opened = [False] * num_choices

    def chunk(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        head = self._prefix[index]
        if not self._opened[index]:
            self._opened[index] = True
            head += _ROLE
        head += b'"content":' + _encode(piece.text)
        if piece.finish is None and not piece.logprobs and usage is None and not self._token_ids:
            return head + self._plain_end
        ids = b',"token_ids":' + _encode(piece.token_ids) if self._token_ids else b""
        logprobs = _encode(chat_logprobs(self._tokenizer, [piece]))
        finish = _encode(piece.finish)
        tail = self._usage_null if usage is None else b',"usage":' + _encode(usage)
        return head + b'},"logprobs":' + logprobs + b',"finish_reason":' + finish + ids + b"}]" + tail + b"}\n\n"

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._usage_head + _encode(usage) + b"}\n\n"

    def body(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        answers = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None},
                "logprobs": chat_logprobs(self._tokenizer, pieces),
                "finish_reason": pieces[-1].finish,
            }
            | token_ids(pieces, self._token_ids)
            for index, pieces in enumerate(choices)
        ]
        return _encode(self._head | {"object": "chat.completion", "choices": answers, "usage": usage})
