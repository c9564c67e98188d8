"""Writes smollm2_greedy.json: what transformers generates greedily in float32, for parity tests to compare with.

Run `python tests/reference/make_reference.py` after `phaseplane pull smollm2-135m`; it takes some minutes.
End-of-sequence tokens are generated like any other.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference.prompts import build_prompts

from transfer.models import model_dir, read_identity

REFERENCE_FILE = Path(__file__).with_name("smollm2_greedy.json")
NUM_OUTPUT_TOKENS = 64


def greedy(model: Any, token_ids: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy continuation and, for each token, by how much its logit led the second best."""
    import torch

    output: list[int] = []
    margins: list[float] = []
    with torch.inference_mode():
        result = model(torch.tensor([token_ids]), use_cache=True, logits_to_keep=1)
        while True:
            top = result.logits[0, -1].float().topk(2)
            output.append(int(top.indices[0]))
            margins.append(round(float(top.values[0] - top.values[1]), 5))
            if len(output) == num_tokens:
                return output, margins
            result = model(torch.tensor([output[-1:]]), cache=result.cache, use_cache=True)


def load_reference_model(directory: Path) -> Any:
    """The float32 model as transformers runs it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def load_reference() -> dict[str, Any]:
    """{"model", "revision", "num_output_tokens", "prompts": [{"name", "prompt", "output", "margins"}]}."""
    reference: dict[str, Any] = json.loads(REFERENCE_FILE.read_text(encoding="utf-8"))
    return reference


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=REFERENCE_FILE)
    options = parser.parse_args()
    from tokenizers import Tokenizer

    directory = model_dir(options.model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = build_prompts(lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids))
    model = load_reference_model(directory)
    entries = []
    for done, prompt in enumerate(prompts, start=1):
        output, margins = greedy(model, prompt.token_ids, NUM_OUTPUT_TOKENS)
        entries.append({"name": prompt.name, "prompt": prompt.token_ids, "output": output, "margins": margins})
        print(f"{done}/{len(prompts)} {prompt.name} smallest margin {min(margins)}", file=sys.stderr, flush=True)
    identity = read_identity(directory)
    reference = {
        "model": identity.name,
        "revision": identity.revision,
        "num_output_tokens": NUM_OUTPUT_TOKENS,
        "prompts": entries,
    }
    lines = json.dumps(reference, separators=(",", ":")).replace('{"name"', '\n{"name"')
    options.out.write_text(lines + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
