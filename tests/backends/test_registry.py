"""Backends that are files: beside a model, or in the backend directory."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.base import ModelArguments
from backends.registry import (
    backend_class,
    entry_points_of,
    find_backend_file,
    folder_backends,
    import_backend_file,
    known_backends,
)
from kernel.errors import InternalError, InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends.conftest import Lab

BACKEND = """
from backends.base import Backend
from backends.worker.request import OutputValue


class Constant(Backend):
    VALUE = {value}

    def execute(self, requests, timings):
        for request in requests:
            given = request.inputs[0]
            request.respond([OutputValue("OUT", "FP32", given.as_numpy() * 0 + self.VALUE)])
"""

MODEL = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils
from constants import VALUE


class TritonPythonModel:
    def initialize(self, args):
        self.factor = float(json.loads(args["model_config"])["parameters"]["factor"]["string_value"])

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([VALUE * self.factor], np.float32))])
            for _ in requests
        ]
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def arguments(root: Path, *, directory: bool = True, **config: Any) -> ModelArguments:
    settings = {"backend-directory": str(root / "backends")} if directory else {}
    given = {"name": "m", "backend": "constant", "output": [{"name": "OUT"}], **config}
    return ModelArguments(given, root / "m", 1, "m_0", backend_config=settings)


def answer(lab: Lab, given: ModelArguments, name: str = "constant") -> float:
    backend = backend_class(name, given)(lab)
    backend.load(given)
    request = lab.request({"IN": np.ones(1, np.float32)})
    backend.execute([request], lab.timings)
    backend.finalize()
    return float(lab.outputs(request)["OUT"][0])


def test_a_file_is_found_in_the_version_then_in_the_model_then_in_the_directory(lab: Lab, tmp_path: Path) -> None:
    given = arguments(tmp_path)
    write(tmp_path / "backends/constant/backend.py", BACKEND.format(value=3))
    assert answer(lab, given) == 3
    write(tmp_path / "m/backend.py", BACKEND.format(value=2))
    assert answer(lab, given) == 2
    write(tmp_path / "m/1/backend.py", BACKEND.format(value=1))
    assert answer(lab, given) == 1
    assert find_backend_file("other", arguments(tmp_path / "elsewhere")) is None


def test_a_built_in_backend_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    write(tmp_path / "m/backend.py", BACKEND.format(value=1))
    assert backend_class("identity", arguments(tmp_path)).__module__ == "backends.builtin.identity"


def test_a_backend_in_the_directory_replaces_an_example_of_its_name(lab: Lab, tmp_path: Path) -> None:
    own = write(tmp_path / "backends/identity/backend.py", BACKEND.format(value=5))
    assert answer(lab, arguments(tmp_path), "identity") == 5
    assert known_backends(tmp_path / "backends")["identity"] == str(own)
    assert "builtin" in known_backends(tmp_path / "backends")["add_sub"]


def test_a_backend_in_the_directory_does_not_replace_a_real_one(tmp_path: Path) -> None:
    write(tmp_path / "backends/onnxruntime/backend.py", BACKEND.format(value=5))
    assert backend_class("onnxruntime", arguments(tmp_path)).__module__ == "backends.onnxruntime.backend"
    assert "onnxruntime.backend" in known_backends(tmp_path / "backends")["onnxruntime"]


@pytest.mark.parametrize("name", ["..", "../backends/constant", "", "a\0b"])
def test_a_name_leads_to_no_file_outside_of_the_directory(tmp_path: Path, name: str) -> None:
    write(tmp_path / "backend.py", BACKEND.format(value=1))
    write(tmp_path / "backends/constant/backend.py", BACKEND.format(value=1))
    assert find_backend_file(name, arguments(tmp_path)) is None


def test_a_runtime_names_the_file_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "backends/constant/backend.py", "")
    based = write(tmp_path / "backends/constant/model.py", "")
    write(tmp_path / "m/1/model.py", "")  # belongs to the model
    assert find_backend_file("constant", arguments(tmp_path, runtime="model.py")) == based
    for runtime in ("libtriton_constant.so", "../constant/model.py"):
        with pytest.raises(InvalidArgument) as error:
            find_backend_file("constant", arguments(tmp_path, runtime=runtime))
        assert error.value.message == (
            f"unable to find backend library '{runtime}' for model 'm', searched: "
            f"{tmp_path}/m/1:{tmp_path}/m:{tmp_path}/backends/constant"
        )


def test_a_python_based_backend_runs_models_that_have_only_a_configuration(lab: Lab, tmp_path: Path) -> None:
    write(tmp_path / "backends/constant/model.py", MODEL)
    write(tmp_path / "backends/constant/constants.py", "VALUE = 21\n")
    given = arguments(tmp_path, parameters={"factor": {"string_value": "2"}})
    assert answer(lab, given) == 42


def test_a_file_without_exactly_one_backend_is_refused(tmp_path: Path) -> None:
    none = write(tmp_path / "none.py", "from backends.base import Backend\n")
    with pytest.raises(InvalidArgument, match="must have one class that is .*, it has none"):
        import_backend_file(none)
    two = write(tmp_path / "two.py", BACKEND.format(value=1) + "\n\nclass Again(Backend): ...\n")
    with pytest.raises(InvalidArgument, match="it has Again, Constant"):
        import_backend_file(two)
    derived = write(tmp_path / "derived.py", BACKEND.format(value=1) + "\n\nclass Derived(Constant): ...\n")
    assert import_backend_file(derived).__name__ == "Derived"
    assert import_backend_file(derived) is import_backend_file(derived)


def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.py", "import nowhere_at_all\n")
    with pytest.raises(InternalError, match=r"broken.py' cannot be imported: ModuleNotFoundError: No module"):
        import_backend_file(broken)


def test_the_table_of_backends_has_those_of_the_directory(tmp_path: Path) -> None:
    own = write(tmp_path / "constant/backend.py", "")
    based = write(tmp_path / "based/model.py", "")
    write(tmp_path / "onlylib/libtriton_onlylib.so", "")
    assert folder_backends(tmp_path) == {"based": str(based), "constant": str(own)}
    assert folder_backends(tmp_path / "nowhere") == {}
    assert known_backends(tmp_path)["constant"] == str(own)


def test_an_unknown_backend_has_tritons_text_and_the_log_tells_of_a_shared_library(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "backends/constant/libtriton_constant.so", "")
    with pytest.raises(InvalidArgument) as error:
        backend_class("constant", arguments(tmp_path))
    assert error.value.message == (
        "unable to find backend library for backend 'constant', try specifying runtime on the model configuration."
    )
    assert "has a shared library for the backend 'constant': this server runs backends" in caplog.text


GROUP = "naiad.backends"


def install(site: Path, group: str) -> None:
    folder = site / "doubler-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: doubler\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{group}]\ndoubler = doubler.backend:Doubler\n")


def test_the_entry_points_of_installed_packages_are_found(tmp_path: Path) -> None:
    install(tmp_path, GROUP)
    (point,) = entry_points_of(GROUP, [str(tmp_path)])
    assert (point.name, point.value) == ("doubler", "doubler.backend:Doubler")


def test_other_groups_are_left_out(tmp_path: Path) -> None:
    install(tmp_path, "console_scripts")
    assert entry_points_of(GROUP, [str(tmp_path)]) == []


def test_a_folder_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert entry_points_of(GROUP, [str(tmp_path / "gone")]) == []


def test_packages_in_an_archive_are_found(tmp_path: Path) -> None:
    install(tmp_path / "unpacked", GROUP)
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for each in (tmp_path / "unpacked").rglob("*.*"):
            file.write(each, each.relative_to(tmp_path / "unpacked"))
    assert [point.name for point in entry_points_of(GROUP, [str(archive)])] == ["doubler"]


def test_the_list_of_packages_is_not_imported_where_none_adds_a_backend(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom backends.registry import entry_points_of\n"
        f"assert entry_points_of({GROUP!r}, [{str(tmp_path)!r}]) == []\nprint('importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
