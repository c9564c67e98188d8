"""POST /v1/completions, streamed and not, for text and token prompts, one or many."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from aiohttp import web

from controlplane.gateway import tokenizer as text
from controlplane.gateway.assembler import Piece, token_ids
from controlplane.gateway.bodies import CompletionBody, decoder, read, receive
from controlplane.gateway.generate import Call, Usage, model_of
from controlplane.gateway.logprobs import completion_logprobs
from controlplane.gateway.params import Wanted, check, completion_prompts
from controlplane.gateway.service import GATEWAY, ServedModel

_decoder = decoder(CompletionBody)
_encode = msgspec.json.Encoder().encode


async def completions(request: web.Request) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    arrived_s = gateway.now()
    body = read(_decoder, await receive(request))
    model = model_of(gateway, body.model)
    wanted = check(body, model.tokenizer.vocab_size)
    prompts = completion_prompts(body.prompt, model.tokenizer.vocab_size)
    call = Call(gateway, model, request, gateway.mint_id("cmpl"), wanted, len(prompts))
    prompt_ids = [
        await text.encode(model.tokenizer, prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    call.start(prompt_ids, arrived_s)
    return await call.answer(CompletionFormat(model, call.call_id, len(call.streams), wanted))


class CompletionFormat:
    """Chunks are assembled from parts that were encoded once for the call."""

    def __init__(self, model: ServedModel, call_id: str, num_choices: int, wanted: Wanted) -> None:
        self._tokenizer, self._token_ids = model.tokenizer, wanted.token_ids
        head = {"id": call_id, "object": "text_completion", "created": int(time.time())}
        self._head = head | {"model": model.served_name}
        encoded = _encode(self._head)[:-1]
        self._prefix = [
            b"data: " + encoded + b',"choices":[{"index":' + str(index).encode() + b',"text":'
            for index in range(num_choices)
        ]
        self._usage_null = b',"usage":null' if wanted.include_usage else b""
        self._plain_end = b',"logprobs":null,"finish_reason":null}]' + self._usage_null + b"}\n\n"
        self._usage_head = b"data: " + encoded + b',"choices":[],"usage":'
        self._offsets = [0] * num_choices

    def chunk(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        head = self._prefix[index] + _encode(piece.text)
        if self._token_ids:
            head += b',"token_ids":' + _encode(piece.token_ids)
        if piece.finish is None and not piece.logprobs and usage is None:
            return head + self._plain_end
        logprobs = _encode(completion_logprobs(self._tokenizer, [piece], self._offsets[index]))
        self._offsets[index] += len(piece.text)
        tail = self._usage_null if usage is None else b',"usage":' + _encode(usage)
        finish = _encode(piece.finish)
        return head + b',"logprobs":' + logprobs + b',"finish_reason":' + finish + b"}]" + tail + b"}\n\n"

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._usage_head + _encode(usage) + b"}\n\n"

    def body(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        answers = [
            {
                "index": index,
                "text": "".join(piece.text for piece in pieces),
                "logprobs": completion_logprobs(self._tokenizer, pieces, 0),
                "finish_reason": pieces[-1].finish,
            }
            | token_ids(pieces, self._token_ids)
            for index, pieces in enumerate(choices)
        ]
        return _encode(self._head | {"choices": answers, "usage": usage})
