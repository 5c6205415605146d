"""The options of ONNX Runtime's providers that we set are in its libraries. No GPU is needed.

Skipped where onnxruntime-gpu is not installed.
"""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest

from backends.onnxruntime import options, providers

FOLDER = Path(onnxruntime.__file__).parent / "capi"


def library(name: str) -> bytes:
    found = sorted(FOLDER.glob(name))
    if not found:
        pytest.skip("onnxruntime-gpu is not installed")
    return found[0].read_bytes()


def test_the_cuda_provider_knows_what_we_set() -> None:
    names = {
        "device_id", "has_user_compute_stream", "user_compute_stream", providers.CUDA_GRAPH, *providers.CUDA_BOOLEANS,
        *providers.CUDA_PARAMETERS, *(value for values in providers.CUDA_NUMBERED.values() for value in values),
    }  # fmt: skip
    found = library("libonnxruntime_providers_cuda.so")
    assert {name for name in names if name.encode() not in found} == set()


def test_the_tensorrt_provider_knows_what_we_set() -> None:
    names = (
        providers.TENSORRT_INTEGERS | providers.TENSORRT_BOOLEANS | providers.TENSORRT_TEXTS | providers.TENSORRT_PATHS
        | set(filter(None, providers.TENSORRT_PRECISIONS.values()))
    )  # fmt: skip
    found = library("libonnxruntime_providers_tensorrt.so")
    assert {name for name in names if name.encode() not in found} == set()


def test_runs_have_the_entries_that_we_add() -> None:
    found = library("onnxruntime_pybind11_state*.so")
    for name in (options.GRAPH_NUMBER, options.DOES_NOT_WAIT, options.SHRINKAGE):
        assert name.encode() in found
