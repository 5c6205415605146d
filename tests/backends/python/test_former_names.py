"""The imports of NVIDIA's backend for vLLM, with modules of vLLM as older and as newer versions have them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from backends.base import ModelArguments
from backends.python.backend import python_based
from kernel.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.backends.python.conftest import Lab

#: The lines of the backend's files that newer versions of vLLM break.
MODEL = """
from vllm.inputs.data import TokensPrompt
from vllm.v1.metrics.loggers import build_1_2_5_buckets
import vllm.inputs.data

class TritonPythonModel:
    def initialize(self, args):
        assert vllm.inputs.data.TokensPrompt is TokensPrompt
        if build_1_2_5_buckets(5) != [1, 2, 5]:
            raise ValueError(f"buckets are {build_1_2_5_buckets(5)}")

    def execute(self, requests):
        return []
"""

BUCKETS = "def build_1_2_5_buckets(most):\n    return [1, 2, 5]\n"

OLDER = {
    "vllm/inputs/__init__.py": "",
    "vllm/inputs/data.py": "class TokensPrompt: pass\n",
    "vllm/v1/metrics/loggers.py": BUCKETS,
}
NEWER = {
    "vllm/inputs/__init__.py": "class TokensPrompt: pass\n",
    "vllm/v1/metrics/loggers.py": "",
    "vllm/v1/metrics/buckets.py": BUCKETS,
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which `vllm` is imported, and from which it has gone after the test."""
    write(tmp_path, {"extra/vllm/model.py": MODEL, "m/1/model.json": "{}", "packages/vllm/__init__.py": ""})
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages"), *sys.path])
    yield tmp_path / "packages"
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def load(lab: Lab, root: Path, name: str = "vllm") -> None:
    arguments = ModelArguments({"name": "m", "backend": name}, root / "m", 1, "m_0")
    backend = python_based(root / "extra" / name / "model.py")(lab)
    backend.load(arguments)
    backend.finalize()


@pytest.mark.parametrize("files", [OLDER, NEWER], ids=["older", "newer"])
def test_the_backend_loads_with_older_and_newer_versions_of_vllm(
    lab: Lab, installed: Path, files: dict[str, str]
) -> None:
    write(installed, files)
    load(lab, installed.parent)


def test_other_backends_get_no_names(lab: Lab, installed: Path) -> None:
    write(installed, NEWER)
    write(installed.parent, {"extra/other/model.py": MODEL})
    with pytest.raises(InternalError, match=r"No module named 'vllm\.inputs\.data'"):
        load(lab, installed.parent, "other")


def test_a_vllm_that_cannot_be_imported_says_why_itself(lab: Lab, installed: Path) -> None:
    write(installed, {"vllm/__init__.py": 'raise RuntimeError("no GPU is there")\n'})
    with pytest.raises(InternalError, match="no GPU is there"):
        load(lab, installed.parent)
