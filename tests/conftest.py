"""Settings that every test needs before torch or SGLang are imported."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

# As the Makefile sets them: plain `pytest` must not find other arithmetic or reach for a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_report_header() -> str:
    if importlib.util.find_spec("sgl_kernel") is None:
        return "no sgl_kernel: tests that import SGLang fail; use `make test` or put tools/cpu_shim on PYTHONPATH"
    return "SGLang on the CPU"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run beside server processes on two cores; more threads only make them wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
