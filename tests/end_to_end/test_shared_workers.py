"""Several models in one process (`naiad.worker`): they execute in turn, keep their modules apart, and die together."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.end_to_end.conftest import WriteModel

CONFIG = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_STRING dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
"""
SHARED = CONFIG + 'parameters { key: "naiad.worker" value { string_value: "small" } }\n'

#: Responds with what its own `utils.py` says, imported at the top and inside of `execute`; with what a package of its
#: own says; with its process; and with the folder that pb_utils knows. 1 makes it wait, 2 makes it crash.
SOURCE = """
    import os
    import time
    import utils

    class TritonPythonModel:
        def initialize(self, args):
            self.name = args["model_name"]

        def execute(self, requests):
            import late
            from parts.deep import WORD
            responses = []
            for request in requests:
                code = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0]
                if code == 1:
                    time.sleep(0.3)
                if code == 2:
                    os.abort()
                words = [self.name, utils.WORD, late.WORD, WORD, str(os.getpid()), pb_utils.get_model_dir()]
                out = np.array([word.encode() for word in words], np.object_)
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
            return responses
"""


@pytest.fixture
def repository(write_model: WriteModel, tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        write_model(name, CONFIG if name == "c" else SHARED, SOURCE)
        folder = tmp_path / name / "1"
        (folder / "utils.py").write_text(f"WORD = 'utils of {name}'\n")
        (tmp_path / name / "late.py").write_text(f"WORD = 'late of {name}'\n")
        (folder / "parts").mkdir()
        (folder / "parts" / "__init__.py").touch()
        (folder / "parts" / "deep.py").write_text(f"WORD = 'part of {name}'\n")
    return tmp_path


@pytest.fixture
def server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=*") as server:
        yield server


def post(server: ServerProcess, path: str, body: object = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body) if body is not None else None)
        response = connection.getresponse()
        content = response.read()
        return response.status, json.loads(content) if content else None
    finally:
        connection.close()


def ask(server: ServerProcess, model: str, code: int = 0) -> tuple[int, Any]:
    """Return the status, and the words of the response or the error."""
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [code]}
    status, content = post(server, f"/v2/models/{model}/infer", {"inputs": [tensor]})
    return status, content["outputs"][0]["data"] if status == 200 else content["error"]


def process_of(server: ServerProcess, model: str) -> int:
    status, words = ask(server, model)
    assert status == 200, words
    return int(words[4])


def test_models_share_a_process_and_have_modules_of_their_own(server: ServerProcess, repository: Path) -> None:
    for _ in range(3):
        for name in ("a", "b", "c"):
            status, words = ask(server, name)
            assert status == 200, words
            assert words[:4] == [name, f"utils of {name}", f"late of {name}", f"part of {name}"]
            assert words[5] == str(repository / name / "1")
    assert process_of(server, "a") == process_of(server, "b") != process_of(server, "c")
    assert sorted(server.workers().values()) == ["c", "worker small"]


def test_models_of_a_process_execute_in_turn(server: ServerProcess) -> None:
    ask(server, "a")
    began = time.perf_counter()
    threads = [threading.Thread(target=ask, args=(server, name, 1)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.perf_counter() - began >= 0.6


def test_models_of_a_process_are_lost_together_and_one_process_brings_them_back(server: ServerProcess) -> None:
    before = process_of(server, "a")
    status, error = ask(server, "a", 2)
    assert status == 503
    assert "SIGABRT" in error
    assert "it shared worker 'small' with 'b'" in error
    wait_for(lambda: ask(server, "a")[0] == 200 and ask(server, "b")[0] == 200)
    assert process_of(server, "a") == process_of(server, "b") != before
    assert sorted(server.workers().values()) == ["c", "worker small"]
    server.wait_for_log("worker 'small' of 2 models was lost: killed by signal 6 (SIGABRT)")
    server.wait_for_log("the worker of model instance 'b_0_0' was lost")


def test_an_unloaded_model_leaves_the_others_and_the_last_one_ends_the_process(server: ServerProcess) -> None:
    process = process_of(server, "a")
    assert post(server, "/v2/repository/models/a/unload")[0] == 200
    assert process_of(server, "b") == process
    assert post(server, "/v2/repository/models/a/load")[0] == 200
    assert process_of(server, "a") == process
    for name in ("a", "b"):
        assert post(server, f"/v2/repository/models/{name}/unload")[0] == 200
    wait_for(lambda: process not in server.workers())
    assert post(server, "/v2/repository/models/b/load")[0] == 200
    assert process_of(server, "b") != process


def test_a_model_that_cannot_be_loaded_leaves_the_others_alone(server: ServerProcess, repository: Path) -> None:
    process = process_of(server, "a")
    (repository / "b" / "1" / "model.py").write_text("raise ValueError('broken')\n")
    status, answer = post(server, "/v2/repository/models/b/load")
    assert status == 400
    assert "broken" in answer["error"]
    assert process_of(server, "a") == process
    assert process_of(server, "b") == process  # the version that was there serves on


def test_a_killed_process_is_started_once(server: ServerProcess) -> None:
    process = process_of(server, "a")
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: ask(server, "b")[0] == 200 and ask(server, "a")[0] == 200)
    assert process_of(server, "a") == process_of(server, "b") != process


def test_models_that_come_and_go_leave_nothing_in_the_process(server: ServerProcess, repository: Path) -> None:
    process = process_of(server, "a")

    def cycle() -> None:
        assert post(server, "/v2/repository/models/a/unload")[0] == 200
        assert post(server, "/v2/repository/models/a/load")[0] == 200
        assert process_of(server, "a") == process

    def state() -> tuple[int, int]:
        """Return how many descriptors and threads the process has."""
        return len(os.listdir(f"/proc/{process}/fd")), len(os.listdir(f"/proc/{process}/task"))

    cycle()  # pb_utils refers to the model that executed last, also when it has left
    before = state()
    for _ in range(10):
        cycle()
    # Fewer if the model of the first cycle had not quite left.
    wait_for(lambda: all(now <= then for now, then in zip(state(), before, strict=True)))
    assert process_of(server, "b") == process


def test_the_index_says_who_was_lost_with_whom(server: ServerProcess, repository: Path) -> None:
    process = process_of(server, "a")
    for name in ("a", "b"):  # so that the models stay lost
        (repository / name / "1" / "model.py").write_text("import threading\nthreading.Event().wait()\n")
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: "was lost" in reason(server, "a") and "was lost" in reason(server, "b"))
    assert reason(server, "b").startswith(
        "instance 'b_0_0' was lost and is started again: killed by signal 9 (SIGKILL)"
    )
    assert "shared worker 'small' with 'a'" in reason(server, "b")
    assert reason(server, "c") == ""


def reason(server: ServerProcess, model: str) -> str:
    _, index = post(server, "/v2/repository/index")
    return str(next(item.get("reason", "") for item in index if item["name"] == model))
