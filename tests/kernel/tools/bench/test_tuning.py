"""`naiad tune` on a whole server: others lose no request, and the model has its old configuration afterwards."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import typer

from bench.server import ServerProcess, wait_for
from kernel.tools.bench import tuning
from kernel.tools.bench.options import tune
from tests.docs.documents import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = """
# a comment that stays
backend: "identity"
max_batch_size: 8
instance_group [{ count: 1 kind: KIND_CPU }]
input [{ name: "IN" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [4] }]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [{ name: "IN" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [4] }]
ensemble_scheduling { step { model_name: "echo" model_version: -1
  input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, config in {"echo": CONFIG, "chain": ENSEMBLE}.items():
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(config)
    return tmp_path / "models"


@pytest.fixture
def server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=*") as started:
        yield started


def run(capsys: pytest.CaptureFixture[str], model: str, url: str, **options: Any) -> tuple[int, str, str]:
    """Return the exit code and what was printed to both streams."""
    usual: dict[str, Any] = {
        "duration": 0.3, "concurrency": "1:2", "instances": "1:2", "batch_sizes": "8", "delays": "0",
    }  # fmt: skip
    with pytest.raises(typer.Exit) as raised:
        tune(model, url, **{**usual, **options})
    printed = capsys.readouterr()
    return raised.value.exit_code, printed.out, printed.err


def config_of(server: ServerProcess, model: str = "echo") -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{server.url}/v2/models/{model}/config") as response:
        found: dict[str, Any] = json.load(response)
        return found


class _OtherClient:
    """Sends requests all the time, and keeps what went wrong."""

    def __init__(self, url: str) -> None:
        self._url = f"http://{url}/v2/models/echo/infer"
        self.errors: list[str] = []
        self.count = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> _OtherClient:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _send(self) -> None:
        tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
        body = json.dumps({"inputs": [tensor]}).encode()
        while not self._ended.is_set():
            try:
                with urllib.request.urlopen(self._url, body) as response:
                    response.read()
                self.count += 1
            except OSError as error:
                self.errors.append(str(error))


def test_others_lose_no_request_and_the_old_configuration_comes_back(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    before = config_of(server)
    with _OtherClient(server.url) as other:
        code, out, _ = run(capsys, "echo", server.url, as_json=True)
    assert code == 0
    assert other.errors == []
    assert other.count > 0
    assert config_of(server) == before
    found = json.loads(out)
    tried = [
        row["candidate"] for row in found["rows"]
    ]  # with how many instances delays are tried, depends on the rates
    assert {"instances": 1, "max_batch_size": 8, "delay_us": None} in tried
    assert {each["instances"] for each in tried} == {1, 2}
    assert all(row["problem"] == "" for row in found["rows"])


def test_the_best_one_is_written_and_served(
    server: ServerProcess, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which one is the best depends on the machine: the only other one is compared with a goal that all meet."""
    file = repository / "echo" / "config.pbtxt"
    code, _, err = run(capsys, "echo", server.url, write=str(file.parent), yes=True)
    assert code == 0
    served = config_of(server)
    if "nothing is changed" in err:
        assert file.read_text() == CONFIG
        assert served["instance_group"][0]["count"] == 1
    else:
        assert "# a comment that stays" in file.read_text()
        assert (file.parent / "config.pbtxt.before-tune").read_text() == CONFIG
        assert f"count: {served['instance_group'][0]['count']}" in file.read_text()


def test_a_goal_that_nothing_meets_changes_nothing(
    server: ServerProcess, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "echo", server.url, latency=0.0001, write=str(repository / "echo"), yes=True)
    assert code == 2
    assert "no configuration has p99 of at most 0.0001 ms; nothing is changed" in err
    assert "no load has p99" in out
    assert (repository / "echo" / "config.pbtxt").read_text() == CONFIG


def test_a_setting_that_the_server_refuses_is_a_row_with_the_reason(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "echo", server.url, delays=f"0,{1 << 64}", as_json=True)
    problems = [row["problem"] for row in json.loads(out)["rows"] if row["candidate"]["delay_us"] == 1 << 64]
    assert code == 0
    assert problems
    assert all(problems)


def test_what_cannot_be_tuned_is_explained(
    server: ServerProcess, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, options, words in (
        ("chain", {}, "it is an ensemble: tune the models of its steps"),
        ("none", {}, "unknown model"),
        ("echo", {"write": str(repository / "none")}, "there is no folder"),
    ):
        code, out, err = run(capsys, model, server.url, **options)
        assert (code, out) == (2, "")
        assert words in err


def test_a_server_that_loads_nothing_is_explained(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ServerProcess(repository) as server:
        code, _, err = run(capsys, "echo", server.url)
    assert code == 2
    assert "--model-control-mode=explicit" in err


def test_the_keyboard_ends_it_and_the_old_configuration_comes_back(server: ServerProcess) -> None:
    before = config_of(server)
    words = [sys.executable, "-m", "kernel", "tune", "echo", "-u", server.url, "-c", "1:2", "-d", "1"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as process:
        wait_for(lambda: config_of(server) != before)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped by the keyboard; the model has its old configuration" in err
    assert config_of(server) == before


class _Target:
    """A server whose first load the keyboard ends."""

    served: ClassVar[dict[str, Any]] = {"max_batch_size": 8, "instance_group": [{"count": 1, "kind": "KIND_CPU"}]}

    def __init__(self) -> None:
        self.loads: list[dict[str, Any] | None] = []

    def load(self, config: dict[str, Any] | None) -> None:
        self.loads.append(config)
        if len(self.loads) == 1:
            raise KeyboardInterrupt

    def config(self) -> dict[str, Any]:
        return self.served


def test_the_old_configuration_comes_back_when_the_keyboard_ends_the_first_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = _Target()
    contender = SimpleNamespace(target=target, config=target.served)
    monkeypatch.setattr(tuning, "BenchContender", lambda *_: contextlib.nullcontext(contender))
    code, _, err = run(capsys, "echo", "nowhere")
    assert code == 130
    assert "the model has its old configuration" in err
    assert [config is None for config in target.loads] == [False, True]
