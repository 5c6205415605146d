"""Models on interpreters of their own: whole servers, whose workers run on other versions of Python."""

from __future__ import annotations

import tarfile
import time
import urllib.request
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bench.server import wait_for
from kernel.embedding import EmbeddedServer
from kernel.errors import ServingError
from tests.end_to_end.environments import MODEL, VERSIONS, environment, with_numpy, write_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.slow_loop("the server runs in this process and starts others")]


@pytest.fixture(scope="session")
def kept(request: pytest.FixtureRequest) -> Path:
    """The folder of environments that later runs of the tests use again."""
    found: Path = request.config.cache.mkdir("environments")
    return found


def server(repository: Path, tmp_path: Path, **flags: Any) -> EmbeddedServer:
    flags.setdefault("exit_on_error", False)
    return EmbeddedServer(repository, environment_cache_directory=str(tmp_path / "cache"), metrics_port=0, **flags)


def ask(running: EmbeddedServer, model: str, size: int = 3) -> tuple[list[str], dict[str, Any]]:
    """Send a request; returns what the model says of its Python, and the outputs."""
    words = np.array([b"one", b"two", b"\xff\x00"], object)
    outputs = running.infer(model, {"IN": np.arange(size, dtype=np.float32), "WORDS": words})
    assert np.array_equal(outputs["OUT"], np.arange(size, dtype=np.float32) * 2)
    assert list(outputs["BACK"]) == list(words[::-1])
    return [each.decode() for each in outputs["PYTHON"]], dict(outputs)


def reason(running: EmbeddedServer, model: str) -> str:
    [found] = [each for each in running.models() if each.name == model]
    assert found.state == "UNAVAILABLE"
    return str(found.reason)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_runs_on_its_own_python(version: str, kept: Path, tmp_path: Path) -> None:
    own = with_numpy(version, kept)
    config = environment(str(own)) + "\ninstance_group [ { count: 2 kind: KIND_CPU } ]"
    write_model(tmp_path / "models", "own", config=config)
    write_model(tmp_path / "models", "ours")
    with server(tmp_path / "models", tmp_path) as running:
        for size in (3, 5000, 1_000_000):
            assert ask(running, "own", size)[0] == [version, "", str(own)]
            assert ask(running, "ours", size)[0][1] == "msgspec"
        for model in ("own", "ours"):
            with pytest.raises(ServingError, match="negative"):
                running.infer(model, {"IN": [-1.0], "WORDS": ["a"]})
        assert running.config("own")["input"] == running.config("ours")["input"]
        with urllib.request.urlopen(running.metrics_url) as page:
            lines = page.read().decode()
    assert 'environment_calls_own{model="own"' in lines


def test_a_worker_that_dies_is_started_again_on_its_own_python(kept: Path, tmp_path: Path) -> None:
    own = with_numpy("3.9", kept)
    write_model(tmp_path / "models", "own", config=environment(str(own)))
    with server(tmp_path / "models", tmp_path) as running:
        with pytest.raises(ServingError, match="SIGABRT"):
            running.infer("own", {"IN": [99.0], "WORDS": ["a"]})
        wait_for(lambda: running.model_ready("own"))
        assert ask(running, "own")[0][0] == "3.9"


@pytest.mark.parametrize("version", VERSIONS[:1])
def test_a_decoupled_model_streams_from_its_own_python(version: str, kept: Path, tmp_path: Path) -> None:
    source = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.respond, args=(request.get_response_sender(), request)).start()

    def respond(self, sender, request):
        count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
        for index in range(count):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(5000, index, np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    config = """
input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 5000 ] } ]
model_transaction_policy { decoupled: true }
"""
    write_model(tmp_path / "models", "stream", source, config + environment(str(with_numpy(version, kept))))
    with server(tmp_path / "models", tmp_path) as running:
        found = [int(response["OUT"][4999]) for response in running.stream("stream", {"COUNT": [200]})]
    assert found == list(range(200))


@pytest.mark.parametrize("version", VERSIONS[:2])
def test_a_model_awaits_on_its_own_python(version: str, kept: Path, tmp_path: Path) -> None:
    source = MODEL.replace("    def execute(", "    async def execute(").replace(
        "        responses = []\n", "        await asyncio.sleep(0)\n        responses = []\n"
    )
    write_model(tmp_path / "models", "own", "import asyncio\n" + source, environment(str(with_numpy(version, kept))))
    with server(tmp_path / "models", tmp_path) as running:
        assert ask(running, "own")[0][0] == version


def test_without_shared_memory_as_well(kept: Path, tmp_path: Path) -> None:
    own = with_numpy("3.9", kept)
    write_model(tmp_path / "models", "own", config=environment(str(own)))
    with server(tmp_path / "models", tmp_path, worker_shared_memory=False) as running:
        assert ask(running, "own", 1_000_000)[0][0] == "3.9"


PACKED = """
import sys, os
root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
open(os.path.join(root, "unpacked"), "w").write("by " + sys.version.split()[0])
"""


def pack(own: Path, archive: Path) -> None:
    """Pack an environment as conda-pack does: programs, a link, `conda-unpack`. Its NumPy stays where it is."""
    site = next(own.glob("lib/python*/site-packages"))
    members = {
        "pyvenv.cfg": (own / "pyvenv.cfg").read_bytes(),
        f"lib/{site.parent.name}/site-packages/numpy.pth": f"{site}\n".encode(),
        "bin/conda-unpack": PACKED.encode(),
        "bin/python3": (own / "bin" / "python").resolve().read_bytes(),
    }
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as opened:
            for name, content in members.items():
                info = zipfile.ZipInfo(name)
                info.external_attr = 0o100755 << 16
                opened.writestr(info, content)
        return
    with tarfile.open(archive, "w:gz") as opened_tar:
        for name, content in members.items():
            file = archive.parent / "packed-file"
            file.write_bytes(content)
            file.chmod(0o755)
            opened_tar.add(file, name)
            file.unlink()
        link = tarfile.TarInfo("bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, "python3"
        opened_tar.addfile(link)


@pytest.mark.parametrize("name", ["env.tar.gz", "env.zip"])
def test_an_archive_is_unpacked_once(kept: Path, tmp_path: Path, name: str) -> None:
    own = with_numpy("3.9", kept)
    config = environment(f"$$TRITON_MODEL_DIRECTORY/{name}")
    for model in ("first", "second"):
        folder = write_model(tmp_path / "models", model, config=config).parent
        pack(own, folder / name)
    with server(tmp_path / "models", tmp_path, model_control_mode="explicit", load_model=["first"]) as running:
        python, _, prefix = ask(running, "first")[0]
        assert python == "3.9"
        assert prefix.startswith(str(tmp_path / "cache" / "archive-"))
        [made] = [each for each in (tmp_path / "cache").iterdir() if each.is_dir()]
        assert (made / "unpacked").read_text().startswith("by 3.9")
        (made / "unpacked").write_text("not again")
        (tmp_path / "models" / "second" / name).write_bytes((tmp_path / "models" / "first" / name).read_bytes())
        running.load("second")
        assert ask(running, "second")[0] == [python, "", prefix]
        assert (made / "unpacked").read_text() == "not again"


BROKEN = {
    "missing": ("$$TRITON_MODEL_DIRECTORY/env.tar.gz", "does not exist"),
    "empty": ("$$TRITON_MODEL_DIRECTORY/empty", "is not an environment: it has no bin/python"),
    "file": ("$$TRITON_MODEL_DIRECTORY/config.pbtxt", "is not an archive that can be read"),
    "stops": ("$$TRITON_MODEL_DIRECTORY/stops", "does not start: cannot find a library"),
}


def test_a_model_whose_environment_does_not_start_is_unavailable_with_the_reason(tmp_path: Path) -> None:
    for name, (path, _) in BROKEN.items():
        folder = write_model(tmp_path / "models", name, config=environment(path)).parent
        (folder / "empty").mkdir()
        (folder / "stops" / "bin").mkdir(parents=True)
        (folder / "stops" / "bin" / "python").write_text("#!/bin/sh\necho 'cannot find a library' >&2\nexit 127\n")
        (folder / "stops" / "bin" / "python").chmod(0o755)
    with server(tmp_path / "models", tmp_path) as running:
        for name, (_, text) in BROKEN.items():
            assert text in reason(running, name)


def test_an_environment_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models", "slow", config=environment("$$TRITON_MODEL_DIRECTORY/env")).parent
    (folder / "env" / "bin").mkdir(parents=True)
    (folder / "env" / "bin" / "python").write_text("#!/bin/sh\nsleep 600\n")
    (folder / "env" / "bin" / "python").chmod(0o755)
    begun = time.monotonic()
    with server(tmp_path / "models", tmp_path, environment_timeout_secs=2) as running:
        assert "was not ready within 2 s (--environment-timeout-secs)" in reason(running, "slow")
    assert time.monotonic() - begun < 60


def requirements(folder: Path, lines: str) -> None:
    (folder / "requirements.txt").write_text(lines)


def test_requirements_beside_a_model_are_installed_and_those_of_a_load_request_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip is asked for a package that is not there, without an index: that it is asked shows in the reason."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    requirements(write_model(tmp_path / "models", "own"), "not-there-at-all\n")
    with server(tmp_path / "models", tmp_path, model_control_mode="explicit") as running:
        with pytest.raises(ServingError, match=r"cannot be installed \(.*\): .*not-there-at-all"):
            running.load("own")
        config = '{"backend": "python"}'
        files = {
            "1/model.py": (tmp_path / "models" / "own" / "1" / "model.py").read_bytes(),
            "1/requirements.txt": b"not-there-at-all\n",
        }
        running.load("own", config=config, files=files)
        assert ask(running, "own")[0][1] == "msgspec", "it runs in the environment of the server"
    with server(tmp_path / "models", tmp_path, install_requirements=False) as running:
        assert ask(running, "own")[0][1] == "msgspec"


def test_a_configuration_of_a_load_request_names_no_program_elsewhere(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "own")
    parameters = {"EXECUTION_ENV_PATH": {"string_value": "/usr"}}
    with server(tmp_path / "models", tmp_path, model_control_mode="explicit") as running:
        with pytest.raises(ServingError, match="must name a file or folder of the model"):
            running.load("own", config=f'{{"backend": "python", "parameters": {parameters}}}'.replace("'", '"'))
        running.load("own")
        assert ask(running, "own")[0][1] == "msgspec"
