"""The public data the validation reads: what it is, whose, under which licence, and where to get it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transfer.errors import InvalidValue

DIRECTORIES = (Path("data"), Path("../shared/data"))
"""Where the data is looked for unless told."""


@dataclass(frozen=True, slots=True)
class Source:
    """`files` are relative to the data directory; `origin` is where anybody gets them."""

    name: str
    files: tuple[str, ...]
    what: str
    origin: str
    licence: str

    def missing(self, data: Path) -> list[str]:
        return [file for file in self.files if not (data / file).is_file()]


DISTSERVE = Source(
    "DistServe",
    ("distserve/profiler-a100-80g.distserve.json", "distserve/profiler-a100-80g.vllm.json"),
    "coefficients of measured step times of OPT-13B and 66B on A100-80G",
    "github.com/LLMServe/DistServe, simdistserve/estimators/profiled_data",
    "Apache-2.0",
)
SPLITWISE = Source(
    "Splitwise",
    ("splitwise/perf_model.csv",),
    "measured prompt and token times of Llama-2-70B and BLOOM-176B on A100 and H100",
    "github.com/Mutinifni/splitwise-sim, data/perf_model.csv",
    "MIT",
)
AZURE = Source(
    "Azure",
    ("azure/AzureLLMInferenceTrace_conv.csv",),
    "arrivals and lengths of a real chat service",
    "github.com/Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_conv.csv",
    "CC-BY-4.0; cite Splitwise, ISCA 2024",
)
MOONCAKE = Source(
    "Mooncake",
    ("mooncake/conversation_trace.jsonl",),
    "arrivals, lengths and prefix blocks of a real chat service",
    "github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl",
    "Apache-2.0",
)
SILICON = Source(
    "AIConfigurator",
    ("silicon/measured.csv",),
    "measured TTFT and TPOT of public models on H100, H200, B200, B300, GB200 and GB300",
    "PyPI: aiconfigurator-core 0.12.0, the rows of its measured set",
    "Apache-2.0",
)
SOURCES = (DISTSERVE, SPLITWISE, AZURE, MOONCAKE, SILICON)


def data_directory(told: Path | None) -> Path:
    """The directory to read. Raises InvalidValue when it, or any of the usual ones, is not there."""
    for directory in DIRECTORIES if told is None else (told,):
        if directory.is_dir():
            return directory
    where = "a directory data" if told is None else f"a directory {told}"
    files = "; ".join(f"{source.files[0]} from {source.origin}" for source in SOURCES)
    raise InvalidValue(f"there is no {where} with the public measurements; fetch into one, for --data: {files}")
