"""Tiny random models and a tiny scheduler for tests of the native engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from nodes.engines.engine import Chunk, Sampled, Sampling, StepBatch, StepResult
from nodes.engines.native.engine import NativeEngine
from transfer.terms import SamplingParams

VOCAB_SIZE = 160
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}


def save_tiny_model(directory: Path, config_class: type[Any], **changes: Any) -> Any:
    """Write a random model with visibly different rows, norms and biases; return it as transformers runs it."""
    torch.manual_seed(0)
    config = config_class(**(TINY | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.12))
    model.save_pretrained(directory)
    tokenizer = directory / "tokenizer.json"
    tokenizer.write_text("{}", encoding="utf-8")  # only its digest matters here
    return model.eval()


def reference_logprobs(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """[num_tokens, vocab_size]"""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([list(token_ids)])).logits[0].float(), dim=-1)


def reference_greedy(model: Any, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    history = list(token_ids)
    for _ in range(num_tokens):
        history.append(int(reference_logprobs(model, history)[-1].argmax()))
    return history[len(token_ids) :]


@dataclass
class Sequence_:
    """One request in the tiny scheduler."""

    name: str
    history: list[int]
    num_prompt: int
    table: list[int]
    params: SamplingParams
    computed: int = 0
    outputs: list[Sampled] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.outputs) == self.params.max_tokens


def greedy(num_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, **changes)


async def generate(
    engine: NativeEngine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    chunk: int = 10_000,
    stagger: int = 0,
    scattered: bool = False,
    on_layer: Callable[[int], None] | None = None,
) -> list[list[Sampled]]:
    """All prompts in one continuous batch: chunked prefill beside decodes, prompt i joining after i * stagger steps.

    scattered: block tables of random, non-consecutive blocks.
    """
    free = list(range(engine.num_blocks))
    if scattered:
        random.Random(7).shuffle(free)
    sequences = []
    for index, prompt in enumerate(prompts):
        count = engine.layout.num_blocks(len(prompt) + params.max_tokens)
        table, free = free[:count], free[count:]
        assert len(table) == count, "the test's arena is too small"
        sequences.append(Sequence_(str(index), list(prompt), len(prompt), table, params))
    step = 0
    while not all(sequence.is_done for sequence in sequences):
        active = [s for index, s in enumerate(sequences) if index * stagger <= step and not s.is_done]
        batch = StepBatch([_next_chunk(sequence, chunk) for sequence in active])
        _absorb(active, batch, await engine.step(batch, on_layer))
        step += 1
    return [sequence.outputs for sequence in sequences]


def tokens(outputs: Sequence[Sampled]) -> list[int]:
    return [output.token_id for output in outputs]


def _next_chunk(sequence: Sequence_, size: int) -> Chunk:
    todo = sequence.history[sequence.computed : sequence.computed + size]
    reaches_end = sequence.computed + len(todo) == len(sequence.history)
    sampling = Sampling(sequence.params, sequence.history, len(sequence.outputs)) if reaches_end else None
    return Chunk(sequence.name, todo, sequence.computed, sequence.table, sampling)


def _absorb(active: Sequence[Sequence_], batch: StepBatch, result: StepResult) -> None:
    for sequence, chunk in zip(active, batch.chunks, strict=True):
        sequence.computed += len(chunk.tokens)
        if chunk.sampling is not None:
            sampled = result.sampled[sequence.name]
            sequence.outputs.append(sampled)
            sequence.history.append(sampled.token_id)
