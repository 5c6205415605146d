"""Servers whose repository is in a store that speaks S3's protocol: models come, change and go, and the store fails."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerFailed, ServerProcess, wait_for
from tests.child_processes import children_with
from tests.fake_s3.store import FakeS3

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("s3fs", reason="the extra s3 is not installed")
pytestmark = pytest.mark.slow

CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""

#: Returns the input plus a number.
PLUS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor + np.int32(NUMBER))]) for tensor in tensors]
"""

EXPLICIT = "--model-control-mode=explicit"
POLL = ("--model-control-mode=poll", "--repository-poll-secs=1")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-user")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with FakeS3() as store:
        yield store


def put(store: FakeS3, name: str, number: int, config: str = CONFIG) -> None:
    """Write a model that adds `number`."""
    store.put(f"repo/{name}/config.pbtxt", config)
    store.put(f"repo/{name}/1/model.py", PLUS.replace("NUMBER", str(number)))


def serve(store: FakeS3, *flags: str) -> ServerProcess:
    """Return a server of the store's models."""
    return ServerProcess(None, f"--model-repository={store.address}/repo", *flags)


def call(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    try:
        connection.request("POST", f"/v2/{path}", json.dumps(body or {}))
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"{}")
    finally:
        connection.close()


def result(server: ServerProcess, name: str = "plus") -> int:
    """Return what a model makes of 0; -1 if it does not serve."""
    status, answer = call(
        server, f"models/{name}/infer", {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [0]}]}
    )
    return int(answer["outputs"][0]["data"][0]) if status == 200 else -1


def readers(server: ServerProcess) -> list[int]:
    """Return the processes of a server that read clouds."""
    return children_with("clouds.process", server.pid)


def folders_of(server: ServerProcess) -> set[str]:
    """Return the temporary folders with copies that a server has."""
    folders = set()
    for descriptor in Path(f"/proc/{server.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            if found := re.match(r".*/naiad-model-\w+", os.readlink(descriptor)):
                folders.add(found[0])
    return folders


def test_models_are_served_and_follow_the_store(store: FakeS3) -> None:
    put(store, "plus", 1)
    put(store, "other", 7)
    with serve(store, *POLL) as server:
        assert (result(server), result(server, "other")) == (1, 7)
        store.fetched()
        put(store, "plus", 2)
        put(store, "third", 3)
        wait_for(lambda: result(server) == 2 and result(server, "third") == 3)
        fetched = store.fetched()
        assert "repo/plus/1/model.py" in fetched
        assert not [key for key in fetched if key.startswith("repo/other/")]
        del store.objects["repo/other/1/model.py"], store.objects["repo/other/config.pbtxt"]
        wait_for(lambda: result(server, "other") == -1)
        copies = folders_of(server)
        assert copies
        assert server.stop() == 0
    assert not [folder for folder in copies if Path(folder).exists()]


def test_a_changed_instance_group_neither_reloads_the_model_nor_fetches_its_files(store: FakeS3) -> None:
    put(store, "plus", 1)
    with serve(store, *POLL) as server:
        [before] = server.workers("plus")
        store.fetched()
        put(store, "plus", 1, CONFIG + "instance_group [{ count: 3 kind: KIND_CPU }]")
        wait_for(lambda: len(server.workers("plus")) == 3)
        assert before in server.workers("plus")
        assert "repo/plus/1/model.py" not in store.fetched()
        assert result(server) == 1
        os.kill(before, signal.SIGKILL)  # its successor reads the files again
        wait_for(lambda: len(server.workers("plus")) == 3 and before not in server.workers("plus"))
        assert result(server) == 1


def test_a_store_that_fails_takes_no_model_away(store: FakeS3) -> None:
    put(store, "plus", 1)
    with serve(store, *POLL) as server:
        for trouble in (403, "html"):
            store.met.clear()
            store.troubles[""] = trouble
            assert store.met.wait(60)
            server.wait_for_log("failed to poll model repository")
            assert result(server) == 1
        wait_for(lambda: call(server, "repository/index")[0] == 500)
        _, answer = call(server, "repository/index")
        assert "failed to read model repository" in answer["error"]
        assert "127.0.0.1" not in answer["error"]
        assert "secret-of-user" not in server.log
        store.troubles.clear()
        store.troubles["repo/plus/1/model.py"] = "cut"
        put(store, "plus", 2)
        server.wait_for_log("failed to copy model 'plus'")
        assert result(server) == 1
        store.troubles.clear()
        wait_for(lambda: result(server) == 2)


def test_clients_load_and_unload_models_of_a_store(store: FakeS3) -> None:
    put(store, "plus", 1)
    put(store, "other", 7)
    with serve(store, EXPLICIT, "--load-model=plus") as server:
        assert not [key for key in store.fetched() if key == "repo/other/1/model.py"]
        assert {each["name"] for each in call_index(server)} == {"plus", "other"}
        assert call(server, "repository/models/other/load")[0] == 200
        assert result(server, "other") == 7
        put(store, "other", 8)
        assert call(server, "repository/models/other/load")[0] == 200
        assert result(server, "other") == 8
        put(store, "late", 9)
        assert call(server, "repository/models/late/load")[0] == 200
        assert result(server, "late") == 9
        assert call(server, "repository/models/absent/load")[0] == 500
        assert call(server, "repository/models/other/unload")[0] == 200
        assert (result(server, "other"), result(server)) == (-1, 1)


def call_index(server: ServerProcess) -> list[dict[str, Any]]:
    status, answer = call(server, "repository/index")
    assert status == 200
    assert isinstance(answer, list)
    return answer


def test_an_unload_ends_a_copy_that_hangs_and_others_do_not_wait(store: FakeS3) -> None:
    put(store, "plus", 1)
    put(store, "stuck", 1)
    store.troubles["repo/stuck/1/model.py"] = "stall"
    with serve(store, EXPLICIT, "--load-model=plus") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        connection.request("POST", "/v2/repository/models/stuck/load", "{}")
        assert store.met.wait(60)
        assert result(server) == 1
        put(store, "late", 9)
        assert call(server, "repository/models/late/load")[0] == 200
        assert call(server, "repository/models/stuck/unload")[0] == 200
        response = connection.getresponse()
        assert response.status == 400
        assert "the load was ended, because the model was unloaded meanwhile" in response.read().decode()
        connection.close()
        store.troubles.clear()
        assert call(server, "repository/models/stuck/load")[0] == 200
        assert result(server, "stuck") == 1


def test_kept_copies_are_used_at_the_next_start(store: FakeS3, tmp_path: Path) -> None:
    put(store, "plus", 1)
    copies = f"--repository-copies={tmp_path / 'copies'}"
    with serve(store, copies) as server:
        assert result(server) == 1
    assert "repo/plus/1/model.py" in store.fetched()
    with serve(store, copies) as server:
        assert result(server) == 1
        assert "repo/plus/1/model.py" not in store.fetched()
        assert folders_of(server) == set()


def test_a_killed_server_leaves_no_reader_and_the_next_one_removes_its_copies(store: FakeS3) -> None:
    put(store, "plus", 1)
    with serve(store, *POLL) as server:
        wait_for(lambda: bool(readers(server)))
        found, copies = readers(server), folders_of(server)
        assert copies
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        wait_for(lambda: not [pid for pid in found if Path(f"/proc/{pid}").exists()])
    with serve(store) as server:
        wait_for(lambda: not [folder for folder in copies if Path(folder).exists()])
        assert result(server) == 1


@pytest.mark.parametrize(
    ("folder", "message"),
    [("absent", "there is no such bucket or object"), ("", "is the folder of one model")],
)
def test_a_repository_that_is_none_is_said_at_the_start(store: FakeS3, folder: str, message: str) -> None:
    store.put("config.pbtxt", CONFIG)
    store.put("1/model.py", "")
    address = f"{store.address}/{folder}" if folder else store.address
    with pytest.raises(ServerFailed) as raised, ServerProcess(None, f"--model-repository={address}"):
        pass
    assert message in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_names_that_are_no_paths_are_left_out_and_logged(store: FakeS3, tmp_path: Path) -> None:
    put(store, "plus", 1)
    store.put("repo/../../escape", "x")
    store.put("repo/plus/../../../../escape.py", "x")
    copies = f"--repository-copies={tmp_path / 'a' / 'b' / 'copies'}"
    with serve(store, copies) as server:
        assert result(server) == 1
        server.wait_for_log("cannot be files of a repository and are left out, such as")
    assert not list(tmp_path.rglob("escape*"))


def test_an_ensemble_and_its_models_come_from_the_store(store: FakeS3) -> None:
    put(store, "plus", 1)
    steps = "".join(
        f'step [{{ model_name: "plus" model_version: -1 input_map {{ key: "IN" value: "{before}" }} '
        f'output_map {{ key: "OUT" value: "{after}" }} }}]\n'
        for before, after in (("IN", "between"), ("between", "OUT"))
    )
    config = CONFIG.replace('backend: "python"', 'platform: "ensemble"') + f"ensemble_scheduling {{ {steps} }}"
    store.put("repo/both/config.pbtxt", config)
    store.put("repo/both/1/", "")
    with serve(store) as server:
        assert result(server, "both") == 2


def test_the_commands_for_authors_copy_a_repository_before(store: FakeS3, tmp_path: Path) -> None:
    put(store, "plus", 1)
    put(store, "wrong", 1, "nonsense")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "kernel", *words]
        return subprocess.run(program, capture_output=True, text=True, env=environment, check=False)

    listed = command("models", f"{store.address}/repo")
    assert listed.returncode == 1
    assert re.search(r"plus +\| 1 +\| python +\| valid", listed.stdout), listed.stdout + listed.stderr
    store.fetched()
    quick = command("models", "--quick", f"{store.address}/repo")
    assert re.search(r"plus +\| 1 +\| python +\|", quick.stdout), quick.stdout + quick.stderr
    assert store.fetched() == ["repo/plus/config.pbtxt", "repo/wrong/config.pbtxt"]
    del store.objects["repo/wrong/config.pbtxt"], store.objects["repo/wrong/1/model.py"]
    checked = command("check", f"{store.address}/repo")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "plus" in checked.stdout
    both = 'platform: "ensemble" ensemble_scheduling { step [{ model_name: "plus" model_version: -1 }] }'
    store.put("repo/both/config.pbtxt", both)
    store.put("repo/both/1/", "")
    put(store, "other", 1)
    one = command("models", "--quick", f"{store.address}/repo/both")
    assert re.findall(r"^\| (\w+) ", one.stdout, re.MULTILINE) == ["Model", "both", "plus"], one.stdout + one.stderr
    one = command("check", f"{store.address}/repo/plus")
    assert re.findall(r"^\| (\w+) ", one.stdout, re.MULTILINE) == ["Model", "plus"], one.stdout + one.stderr
    assert command("models", f"{store.address}/absent").stderr == (
        f"error: failed to read model repository '{store.address}/absent': there is no such bucket or object "
        "(FileNotFoundError: models/absent)\n"
    )
    assert list(tmp_path.iterdir()) == []
