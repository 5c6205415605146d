from __future__ import annotations

import pytest

from backends.onnxruntime.session import advice, installed_versions

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("versions", "active", "text"),
    [
        (
            {"onnxruntime": "1.31.1"},
            [CPU],
            "it is installed with: pip install '.[gpu]' (in a checkout of Naiad), then pip install",
        ),
        (
            {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.0"},
            [CPU],
            "the packages onnxruntime 1.31.1 and onnxruntime-gpu 1.31.0 have the same files, and the files of the "
            "former were installed last. Repair: pip install --force-reinstall --no-deps onnxruntime-gpu",
        ),
        (
            {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"},
            [CUDA, CPU],
            "the libraries of CUDA and cuDNN that onnxruntime-gpu needs must be there",
        ),
    ],
)
def test_what_is_installed_says_what_is_to_be_done(versions: dict[str, str], active: list[str], text: str) -> None:
    assert advice(versions, active, CUDA).startswith(text)


def test_the_installed_packages_are_found() -> None:
    assert {"onnxruntime", "onnxruntime-gpu"} >= installed_versions().keys()
