"""What of vLLM the connector takes hold of, as stand-ins, so that its half beside the scheduler runs without vLLM."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

CONNECTOR = "nodes.engines.vllm.connector"
NAMES = (
    "vllm", "vllm.distributed", "vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1", "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.parallel_state",
)  # fmt: skip


class _Base:
    def __init__(self, **given: Any) -> None:
        self._vllm_config = given["vllm_config"]


@contextmanager
def connector_of(block_size: int) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patched:
        for name in NAMES:
            stand_in = ModuleType(name)
            vars(stand_in).update(
                KVConnectorBase_V1=_Base, KVConnectorMetadata=object, KVConnectorRole=object, get_tp_group=None
            )
            patched.setitem(sys.modules, name, stand_in)
        sys.modules.pop(CONNECTOR, None)
        module = importlib.import_module(CONNECTOR)
        config = SimpleNamespace(cache_config=SimpleNamespace(block_size=block_size))
        try:
            yield module.PhaseplaneConnector(config, None, None)
        finally:
            sys.modules.pop(CONNECTOR, None)
