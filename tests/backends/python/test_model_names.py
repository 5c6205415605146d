"""Modules of a model that have the names of our packages: the model finds its own, and our code goes on."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from backends.python.model_modules import OUR_NAMES

if TYPE_CHECKING:
    from pathlib import Path

#: Imports all that a worker of a Python model has, as workers do before they get a model, and claims the names.
CLAIM = """
import sys
import backends.python.backend, backends.worker.process, protocols, schedulers
from backends.python.model_modules import ModelNames
ours = dict(sys.modules)
sys.path += [{version!r}, {model!r}]
names = ModelNames([{version!r}, {model!r}])
names.claim()
"""


def run(tmp_path: Path, code: str) -> list[str]:
    """Run `code` after the names are claimed, in an interpreter of its own; return the words that it prints."""
    claim = CLAIM.format(version=str(tmp_path / "1"), model=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", claim + textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def module(tmp_path: Path, name: str, *, package: bool) -> None:
    """Write a module of the model whose `OWNER` is the model, or a package with a module `part`."""
    (tmp_path / "1").mkdir(exist_ok=True)
    if package:
        folder = tmp_path / "1" / name
        folder.mkdir()
        (folder / "__init__.py").write_text("OWNER = 'model'\n")
        (folder / "part.py").write_text("OWNER = 'part'\n")
    else:
        (tmp_path / "1" / f"{name}.py").write_text("OWNER = 'model'\n")


@pytest.mark.parametrize("package", [False, True], ids=["module", "package"])
@pytest.mark.parametrize("name", OUR_NAMES)
def test_a_module_of_the_model_wins(tmp_path: Path, name: str, package: bool) -> None:
    module(tmp_path, name, package=package)
    code = f"import {name}\nprint(names.taken == ({name!r},), {name}.OWNER)\n"
    if package:
        code += f"from {name}.part import OWNER\nprint(OWNER)\n"
    assert run(tmp_path, code) == ["True", "model", *(["part"] if package else [])]


def test_a_folder_without_a_file_of_its_own_is_a_package_too(tmp_path: Path) -> None:
    (tmp_path / "1" / "shm").mkdir(parents=True)
    (tmp_path / "1" / "shm" / "part.py").write_text("OWNER = 'part'\n")
    assert run(tmp_path, "from shm.part import OWNER\nprint(OWNER)") == ["part"]


def test_a_module_in_the_folder_above_the_version_wins_as_well(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "kernel.py").write_text("OWNER = 'model'\n")
    assert run(tmp_path, "import kernel\nprint(kernel.OWNER)") == ["model"]


@pytest.mark.parametrize("package", [False, True], ids=["module", "package"])
def test_a_backend_beside_it_still_finds_the_interface_of_backends(tmp_path: Path, package: bool) -> None:
    module(tmp_path, "backends", package=package)
    module(tmp_path, "kernel", package=package)
    (tmp_path / "1" / "backend.py").write_text(
        "from backends import OWNER\n"
        "from backends.base import Backend\n"
        "from backends.batch_tensors import gather\n"
        "from kernel.errors import InvalidArgument\n"
        "class Mine(Backend):\n"
        "    def load(self, arguments): ...\n"
        "    def execute(self, requests, timings): ...\n"
    )
    code = """
    import backend
    print(backend.OWNER, backend.Backend is ours["backends.base"].Backend,
          backend.InvalidArgument is ours["kernel.errors"].InvalidArgument)
    """
    if not package:  # below a module that is no package there is only what was imported before
        (tmp_path / "1" / "backend.py").write_text(
            (tmp_path / "1" / "backend.py").read_text().replace("from backends.batch_tensors import gather\n", "")
        )
    assert run(tmp_path, code) == ["model", "True", "True"]


def test_a_model_with_modules_of_all_our_names_executes(tmp_path: Path) -> None:
    for name in OUR_NAMES:
        module(tmp_path, name, package=name in ("shm", "kernel"))
    (tmp_path / "1" / "model.py").write_text(
        "import backends, kernel, protocols, schedulers, shm\n"
        "import numpy as np\n"
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        owners = {each.OWNER for each in (backends, kernel, protocols, schedulers, shm)}\n"
        "        words = np.array([word.encode() for word in owners], object)\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', words)]) for _ in requests]\n"
    )
    code = f"""
    from pathlib import Path
    base, errors = ours["backends.base"], ours["kernel.errors"]
    wire, request = ours["backends.transport.wire"], ours["backends.worker.request"]
    names.give_back()

    class Host:
        def log(self, level, text): print(level, text)
        def send(self, request, response, final): print(response)
        def respond(self, request, outputs, **more): print(*outputs[0].data.tolist() if outputs else "", more)
        def __getattr__(self, name): return lambda *given, **more: None

    backend = ours["backends.python.backend"].PythonBackend(Host())
    config = {{"name": "m", "output": [{{"name": "OUT"}}]}}
    backend.load(base.ModelArguments(config, Path({str(tmp_path)!r}), 1, instance_name="m_0"))
    print(sys.modules["kernel"].OWNER)
    backend.finalize()
    """
    assert run(tmp_path, code)[-1] == "model"


def test_ours_come_back_for_another_model_of_the_process(tmp_path: Path) -> None:
    module(tmp_path, "shm", package=True)
    code = """
    import shm
    theirs = {name: sys.modules.pop(name) for name in ("shm",)}
    names.give_back()
    from shm.tensor import Tensor
    import shm as again
    print(again is ours["shm"], Tensor is ours["shm.tensor"].Tensor, len(sys.meta_path))
    before = len(sys.meta_path)
    names.claim_again()
    sys.modules.update(theirs)
    import shm as third
    print(third.OWNER, len(sys.meta_path) - before)
    from shm.tensor import Tensor as found
    print(found is Tensor)
    """
    words = run(tmp_path, code)
    assert [words[0], words[1], words[3], words[4], words[5]] == ["True", "True", "model", "1", "True"]


def test_a_model_without_such_names_changes_nothing(tmp_path: Path) -> None:
    module(tmp_path, "other", package=False)
    code = "print(names.taken, len(sys.meta_path)); import kernel; print(kernel is ours['kernel'])"
    assert run(tmp_path, code)[-1] == "True"
    assert run(tmp_path, code)[0] == "()"
