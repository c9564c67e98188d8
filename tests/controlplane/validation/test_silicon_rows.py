"""Reading measured rows, and finding the deployment behind each."""

from __future__ import annotations

import csv
import io

import pytest

from controlplane.validation.recipes import Recipes
from controlplane.validation.rows import Engine, MeasuredRow, parse_rows
from transfer.errors import InvalidValue

COLUMNS = (
    "id", "silicon_data_source", "backend", "model_path", "system", "precision", "mode", "isl", "osl", "batch_size",
    "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "prefill_num_workers", "prefill_tp_size",
    "prefill_attention_dp_size", "prefill_moe_ep_size", "decode_batch_size", "decode_num_workers", "decode_tp_size",
    "decode_attention_dp_size", "decode_moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms",
)  # fmt: skip
RECIPES = """\
model,gpu,backend,precision,isl,osl,image,first,last,draft,prefill,decode,concurrency
deepseek-v3,H200,trtllm,fp8,1024,1024,release:1,2026-01-01,2026-02-01,0,,1x8e,32
deepseek-v3,H200,trtllm,fp8,1024,1024,release:2,2026-01-01,2026-02-01,3,,1x8dpe,32
deepseek-v3,H200,trtllm,fp8,8192,1024,runtime:1,2026-01-01,2026-02-01,1,2x8dpe,5x8e,32w
deepseek-v3,H200,sglang,fp8,1024,1024,sglang:1,2026-01-01,2026-02-01,0,,1x8,4
deepseek-v3,H200,sglang,fp8,1024,1024,sglang:1,2026-01-01,2026-02-01,3,,1x8,4
"""


def row(**values: str) -> MeasuredRow:
    line = dict.fromkeys(COLUMNS, "") | {
        "id": "one", "silicon_data_source": "source_file=a.csv; silicon_concurrency=32; measured=2026-01-10; wip=False",
        "backend": "trtllm", "model_path": "deepseek-ai/DeepSeek-R1", "system": "h200_sxm", "precision": "fp8",
        "mode": "agg", "isl": "1024", "osl": "1024", "batch_size": "32", "tp_size": "8", "moe_tp_size": "1",
        "moe_ep_size": "8", "silicon_ttft_ms": "250.0", "silicon_tpot_ms": "12.5",
    } | values  # fmt: skip
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerow(line)
    text.seek(0)
    [read] = parse_rows(csv.DictReader(text))
    return read


def recipes() -> Recipes:
    return Recipes(csv.DictReader(io.StringIO(RECIPES)))


def test_reads_an_aggregated_row() -> None:
    read = row()
    assert (read.gpu, read.model, read.concurrency, read.image) == ("H200", "deepseek-v3", 32, "")
    assert read.decode == Engine(1, 8, dp=False, ep=True)
    assert not read.disaggregated
    assert read.spread
    assert (read.ttft_s, read.tpot_s) == (0.25, 0.0125)


def test_reads_a_disaggregated_row() -> None:
    read = row(
        mode="disagg", prefill_num_workers="2", prefill_tp_size="1", prefill_attention_dp_size="4",
        decode_num_workers="3", decode_tp_size="8", decode_batch_size="16",
    )  # fmt: skip
    assert read.prefill == Engine(2, 4, dp=True)
    assert read.decode == Engine(3, 8)
    assert read.workers_known


@pytest.mark.parametrize(
    ("sizes", "gpus", "dp"),
    [
        ({"tp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"}, 8, False),
        ({"tp_size": "16", "moe_tp_size": "4", "moe_ep_size": "4"}, 4, False),
        ({"tp_size": "1", "attention_dp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"}, 8, True),
        ({"tp_size": "4", "attention_dp_size": "4", "moe_tp_size": "1", "moe_ep_size": "16"}, 4, True),
        ({"tp_size": "1", "attention_dp_size": "8", "moe_tp_size": "1", "moe_ep_size": "8"}, 8, True),
        ({"tp_size": "4", "moe_tp_size": "2", "moe_ep_size": "2"}, 4, False),
    ],
)
def test_products_of_splits_are_told_from_gpus(sizes: dict[str, str], gpus: int, dp: bool) -> None:
    assert (row(**sizes).decode.gpus, row(**sizes).decode.dp) == (gpus, dp)


def test_names_the_line_that_cannot_be_read() -> None:
    with pytest.raises(InvalidValue, match=r"line 2 .*no shape is known for model 'x/Other'"):
        row(model_path="x/Other")
    with pytest.raises(InvalidValue, match="'fp5' is none of bf16, fp8"):
        row(precision="fp5")


def test_the_image_tells_which_recipe() -> None:
    source = "source_file=a.csv; silicon_concurrency=32; measured=2026-01-10; image=nvcr.io/tensorrt-llm/{}"
    plain = recipes().deployment(row(silicon_data_source=source.format("release:1")))
    drafting = recipes().deployment(row(silicon_data_source=source.format("release:2")))
    assert (plain.draft_tokens, plain.decode.dp, plain.certain) == (0, False, True)
    assert (drafting.draft_tokens, drafting.decode.dp, drafting.certain) == (3, True, True)


def test_clients_may_be_given_for_each_decode_worker() -> None:
    found = recipes().deployment(
        row(
            mode="disagg", isl="8192", prefill_tp_size="8", prefill_moe_ep_size="8", decode_tp_size="8",
            silicon_data_source="source_file=a.csv; silicon_concurrency=160; measured=2026-01-10",
        )
    )  # fmt: skip
    assert found.prefill == Engine(2, 8, dp=True, ep=True)
    assert found.decode == Engine(5, 8, dp=False, ep=True)
    assert (found.clients, found.draft_tokens) == (160, 1)


def test_two_recipes_that_fit_equally_leave_it_open() -> None:
    found = recipes().deployment(
        row(backend="sglang", moe_ep_size="1", silicon_data_source="a; silicon_concurrency=4; measured=2026-01-10")
    )
    assert (found.draft_tokens, found.certain) == (0, False)


def test_without_a_recipe_the_row_counts() -> None:
    found = recipes().deployment(
        row(
            mode="disagg", silicon_data_source="a", prefill_tp_size="4", decode_tp_size="2",
            decode_attention_dp_size="4", decode_batch_size="16", decode_num_workers="3",
        )
    )  # fmt: skip
    assert found.clients == 16 * 3 * 8
    assert found.decode == Engine(3, 8, dp=True)
