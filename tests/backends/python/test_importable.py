"""`triton_python_backend_utils` outside of a server: for editors, type checkers and the tests of model authors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import backends.python.importable
from backends.python import triton_python_backend_utils as pb_utils
from tests.docs.documents import ROOT

[FOLDER] = backends.python.importable.__path__


def test_the_folder_has_the_module_by_its_name_and_all_that_models_use() -> None:
    script = "import triton_python_backend_utils as p; print(p.__file__, *sorted(n for n in dir(p) if n[0] != '_'))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([FOLDER, str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    file, *names = done.stdout.split()
    assert Path(file).parent == Path(FOLDER)
    assert names == sorted(pb_utils.__all__)


def test_objects_name_the_module_that_triton_has_them_in() -> None:
    assert repr(pb_utils.Tensor) == "<class 'c_python_backend_utils.Tensor'>"
    assert repr(pb_utils.InferenceResponse()).startswith("<c_python_backend_utils.InferenceResponse object at 0x")
