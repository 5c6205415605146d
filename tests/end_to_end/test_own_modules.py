"""Models with modules that have the names of our packages: each model imports its own, and the server goes on."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.python.model_modules import OUR_NAMES
from bench.checkout import ROOT
from bench.server import wait_for
from kernel.embedding import EmbeddedServer
from kernel.machine import own_command
from tests.end_to_end.environments import environment, with_numpy

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end.conftest import WriteModel

CONFIG = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_STRING dims: [-1] }, { name: "SAME" data_type: TYPE_INT32 dims: [-1] }]
"""
SHARED = CONFIG + 'parameters { key: "naiad.worker" value { string_value: "small" } }\n'

#: Says who its modules are, imported at the top and later, and passes a large input on. 2 makes it crash.
SOURCE = """
    import os
    import backends, kernel, protocols, schedulers, shm

    class TritonPythonModel:
        def execute(self, requests):
            import kernel as late
            from shm import OWNER
            owners = [each.OWNER for each in (backends, kernel, protocols, schedulers, shm, late)]
            responses = []
            for request in requests:
                given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
                if given[0] == 2:
                    os.abort()
                words = [*owners, OWNER, str(os.getpid())]
                out = np.array([word.encode() for word in words], np.object_)
                outputs = [pb_utils.Tensor("OUT", out), pb_utils.Tensor("SAME", given)]
                responses.append(pb_utils.InferenceResponse(outputs))
            return responses
"""


def write_modules(folder: Path, owner: str, packages: tuple[str, ...]) -> None:
    """Write a module or a package for each of our names."""
    for name in OUR_NAMES:
        if name in packages:
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(f"from {name}.deep import OWNER\n")
            (folder / name / "deep.py").write_text(f"OWNER = {owner!r}\n")
        else:
            (folder / f"{name}.py").write_text(f"OWNER = {owner!r}\n")


def owners(server: EmbeddedServer, model: str) -> tuple[set[str], int]:
    """Send a small and a large request; returns what the modules of the model say, and its process."""
    for size in (1, 100_000):
        outputs = server.infer(model, {"IN": np.ones(size, np.int32)})
        assert outputs["SAME"].tolist() == [1] * size
    *words, process = (each.decode() for each in outputs["OUT"])
    return set(words), int(process)


@pytest.mark.parametrize("packages", [(), OUR_NAMES, ("shm", "backends")], ids=["modules", "packages", "both"])
def test_a_model_imports_its_own_modules(write_model: WriteModel, tmp_path: Path, packages: tuple[str, ...]) -> None:
    write_model("own", CONFIG, SOURCE)
    write_modules(tmp_path / "own" / "1", "own", packages)
    write_model("above", CONFIG, SOURCE)
    write_modules(tmp_path / "above", "above", packages)
    with EmbeddedServer(tmp_path) as server:
        for name in ("own", "above", "own"):
            assert owners(server, name)[0] == {name}


def test_models_of_one_process_have_their_own_modules(write_model: WriteModel, tmp_path: Path) -> None:
    for name, packages in (("a", OUR_NAMES), ("b", ("kernel",)), ("c", ())):
        write_model(name, SHARED, SOURCE)
        write_modules(tmp_path / name / "1", name, packages)
    other = "import json\nclass TritonPythonModel:\n    def execute(self, requests):\n        import kernel\n"
    write_model("d", SHARED, other + "        raise ValueError(kernel.__name__ + str(hasattr(kernel, 'OWNER')))\n")
    with EmbeddedServer(tmp_path) as server:
        processes = set()
        for name in ("a", "b", "a", "c", "b", "c", "a"):
            found, process = owners(server, name)
            assert found == {name}
            processes.add(process)
        assert len(processes) == 1
        with pytest.raises(Exception, match="kernelFalse"):
            server.infer("d", {"IN": np.ones(1, np.int32)})
        os.kill(processes.pop(), signal.SIGKILL)
        wait_for(lambda: all(server.model_ready(name) for name in "abc"))
        for name in "cab":
            assert owners(server, name)[0] == {name}


def test_a_server_may_be_started_in_the_folder_of_such_a_model(
    write_model: WriteModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("own", "other"):
        write_model(name, CONFIG, SOURCE)
        write_modules(tmp_path / name / "1", name, ())
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the server may not be installed, or from another tree
    monkeypatch.chdir(tmp_path / "own" / "1")
    with EmbeddedServer(tmp_path) as server:
        for name in ("own", "other"):
            assert owners(server, name)[0] == {name}


@pytest.mark.parametrize("own", [True, False])
def test_the_current_folder_is_searched_only_if_it_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, own: bool
) -> None:
    monkeypatch.chdir(ROOT if own else tmp_path)
    assert ("-P" in own_command("backends.worker")) is not own


@pytest.mark.slow
def test_a_model_on_its_own_interpreter_imports_its_own_modules(
    write_model: WriteModel, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also those that are installed in its environment."""
    kept: Path = request.config.cache.mkdir("environments")
    own = with_numpy("3.9", kept)
    write_model("own", CONFIG + environment(str(own)), SOURCE)
    write_modules(tmp_path / "own" / "1", "own", ("shm",))
    with EmbeddedServer(tmp_path) as server:
        assert owners(server, "own")[0] == {"own"}
