"""The official `openai` client, unmodified, and curl, against a real fleet with real weights."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

import openai
import pytest
from e2e_fleet import Fleet, running

pytestmark = [pytest.mark.weights, pytest.mark.timeout(200)]

MODEL = "smollm2-135m"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: object) -> Iterator[Fleet]:
    with running(tmp_path_factory.mktemp("fleet"), "--prefill", "1", "--decode", "1") as up:
        yield up


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_curl_streams_the_capital_of_france(fleet: Fleet) -> None:
    body = json.dumps({"model": MODEL, "messages": CAPITAL, "temperature": 0, "stream": True})
    command = ["curl", "-sN", f"{fleet.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    events = [json.loads(line[6:]) for line in out.splitlines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert "Paris" in text
    assert len(events) > 3, "it was not streamed"
    assert out.rstrip().endswith("data: [DONE]")


def test_stream_equals_no_stream_and_usage_is_told_when_asked(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=20)
    assert plain.usage is not None
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=CAPITAL, temperature=0, max_tokens=20, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == plain.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    bare = list(client.chat.completions.create(model=MODEL, messages=CAPITAL, max_tokens=5, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in bare)


def test_stop_string_across_tokens_ends_the_text_before_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, stop=["l of F"])
    assert answer.choices[0].message.content == "The capita"
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_from_the_first_token_on(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 4
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the best"
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content


def test_n_2_gives_two_different_answers_and_a_seed_gives_them_again(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "prompt": "Once upon a time", "n": 2, "temperature": 1.0, "seed": 7, "max_tokens": 24}
    first, again = (client.completions.create(**ask) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 2
    assert texts == [choice.text for choice in again.choices]


def test_max_tokens_1_gives_exactly_one(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="The", max_tokens=1, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].finish_reason == "length"


def test_cancel_stops_both_sides_within_a_second(client: openai.OpenAI, fleet: Fleet) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Count: 1 2 3", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    left = time.monotonic()
    while fleet.get("/v1/fleet")["in_flight"]:
        assert time.monotonic() - left < 5, "the request goes on without its client"
        time.sleep(0.05)
    state = fleet.at_rest()
    assert state["in_flight"] == 0


def test_errors_have_the_shape_and_status_of_the_api(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-nonsense", messages=CAPITAL)
    with pytest.raises(openai.BadRequestError, match="context is 8192"):
        client.completions.create(model=MODEL, prompt="word " * 9000, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
