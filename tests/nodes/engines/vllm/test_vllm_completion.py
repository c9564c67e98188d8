"""Jobs as completion requests, and the stream that answers them."""

from __future__ import annotations

import pytest

from nodes.engines.served import Job, Output
from nodes.engines.vllm.completion import MAX_LINE_BYTES, SseParser, read_error, read_output, request_body
from transfer.errors import JobFailed
from transfer.terms import FinishReason, SamplingParams, TokenIds, TokenLogprob

TICKET = {"job": 7, "num_loaded": 2, "num_tokens": 3}
SAMPLING = SamplingParams(
    max_tokens=20, seed=5, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, min_tokens=3, stop_token_ids=(9,),
    logprobs=2, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.1,
)  # fmt: skip


def job(sampling: SamplingParams | None, tokens: TokenIds | None = None, num_output: int = 0, salt: str = "") -> Job:
    return Job("r", 1, tokens or [1, 2, 3, 4], num_output, sampling, [0], 2, 0, salt=salt, priority=3)


def test_sampling_parameters_are_passed_one_to_one() -> None:
    body = request_body(job(SAMPLING, salt="tenant"), TICKET, "m", (2,))
    expected = {
        "model": "m", "prompt": [1, 2, 3, 4], "max_tokens": 20, "min_tokens": 3, "seed": 5, "temperature": 0.7,
        "top_p": 0.9, "top_k": 40, "min_p": 0.05, "stop_token_ids": [9, 2], "ignore_eos": False, "logprobs": 2,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1, "cache_salt": "tenant",
        "priority": 3, "stream": True, "return_token_ids": True, "return_tokens_as_token_ids": True,
        "kv_transfer_params": {"phaseplane": TICKET},
    }  # fmt: skip
    assert {name: body[name] for name in expected} == expected
    assert "logit_bias" not in body


def test_what_ends_a_text_is_not_asked_for_where_it_is_to_be_ignored() -> None:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, stop_token_ids=(9,))
    body = request_body(job(sampling), TICKET, "m", (2,))
    assert body["stop_token_ids"] == [9]
    assert body["ignore_eos"] is True
    assert "logprobs" not in body
    assert "cache_salt" not in body


def test_output_that_is_there_already_counts_for_limits_penalties_and_seed() -> None:
    body = request_body(job(SAMPLING, [1, 2, 8, 8, 6], num_output=3), TICKET, "m", (2,))
    assert (body["max_tokens"], body["min_tokens"]) == (17, 0)
    assert body["logit_bias"] == {"6": -0.75, "8": -1.0}
    assert body["seed"] != 5
    assert 0 <= body["seed"] < 1 << 63


def test_a_job_for_kv_alone_computes_all_but_its_last_token_and_draws_one() -> None:
    body = request_body(job(None), TICKET, "m", (2,))
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([1, 2, 3], 1, 0.0)


def test_events_come_whole_however_they_are_cut() -> None:
    stream = b'data: {"a": 1}\n\n: comment\r\n\r\ndata: [DONE]\r\n\r\n'
    for size in (1, 2, 7, len(stream)):
        parser, found = SseParser(), []
        for start in range(0, len(stream), size):
            found += parser.feed(stream[start : start + size])
        assert found == [b'{"a": 1}', b"[DONE]"]


def test_a_line_without_end_is_given_up() -> None:
    parser = SseParser()
    with pytest.raises(JobFailed, match="line of over"):
        parser.feed(b"data: " + b"x" * MAX_LINE_BYTES)


def test_tokens_and_finish_are_read() -> None:
    assert read_output(b'{"choices": [{"text": "a", "token_ids": [5, 6]}]}', None) == Output((5, 6))
    last = read_output(b'{"choices": [{"text": "", "token_ids": [2], "finish_reason": "stop"}]}', None)
    assert last == Output((2,), finish=FinishReason.STOP)
    assert read_output(b'{"choices": [], "usage": {"prompt_tokens": 3}}', None) is None
    assert read_output(b"[DONE]", None) is None
    assert read_output(b'{"choices": [{"token_ids": []}]}', None) is None


def test_logprobs_carry_ids_and_as_many_alternatives_as_asked() -> None:
    data = (
        b'{"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-0.5], '
        b'"top_logprobs": [{"token_id:5": -0.5, "token_id:9": -0.25, "token_id:7": -3.0}]}}]}'
    )
    output = read_output(data, 2)
    assert output is not None
    assert output.logprobs == (TokenLogprob(logprob=-0.5, top_ids=(9, 5), top_logprobs=(-0.25, -0.5)),)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"error": {"message": "a secret", "type": "InternalServerError"}}', r"up \(InternalServerError\)$"),
        (b'{"error": {"message": "a secret", "type": 500}}', "gave the request up$"),
        (b'{"choices": [{"token_ids": [1], "finish_reason": "abort"}]}', r"ended the request \(abort\)$"),
        (b'{"choices": [{"token_ids": [1], "finish_reason": "a secret"}]}', "ended the request$"),
        (b'{"choices": [{"text": "a"}]}', "token ids"),
        (b"<html>", "not a completion chunk"),
    ],
)
def test_what_is_no_token_fails_the_job(data: bytes, said: str) -> None:
    with pytest.raises(JobFailed, match=said):
        read_output(data, None)


def test_missing_logprobs_fail_the_job() -> None:
    with pytest.raises(JobFailed, match="0 logprobs for 1 tokens"):
        read_output(b'{"choices": [{"token_ids": [1]}]}', 0)


def test_a_refusal_is_a_sentence_without_what_may_repeat_the_prompt() -> None:
    said = read_error(400, b'{"error": {"message": "cannot tokenize: a secret", "type": "BadRequestError"}}')
    assert said == "vLLM refused the request with 400 (BadRequestError)"
    assert read_error(400, b'{"error": {"type": "a secret"}}') == "vLLM refused the request with 400"
    assert read_error(502, b"bad gateway") == "vLLM refused the request with 502"
