"""`naiad bench` against whole servers: each option, errors, the keyboard, and what stays behind."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from bench.server import ServerProcess, wait_for
from kernel.tools.bench.contender import BenchContender
from kernel.tools.bench.options import bench
from kernel.tools.client import ClientError
from tests.docs.documents import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel.tools.bench.options import BenchLevel

_FP32 = '[{{ name: "{}" data_type: TYPE_FP32 dims: [{}] }}]\n'
IDENTITY = f'backend: "identity"\nmax_batch_size: 8\ninput {_FP32.format("IN", -1)}output {_FP32.format("OUT", -1)}'
SUMS = """
backend: "python"
max_batch_size: 8
sequence_batching { oldest { } control_input [
  { name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] },
  { name: "END" control [{ kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] }] },
  { name: "ID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }] } ] }
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""
#: Fails where a sequence begins twice, goes on without a beginning, or is still open when the model is asked for it.
SUMS_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.open = set()

    def execute(self, requests):
        responses = []
        for request in requests:
            controls = [pb_utils.get_input_tensor_by_name(request, name) for name in ("START", "END", "ID")]
            start, end, id = (int(each.as_numpy().flat[0]) for each in controls)
            wrong = (id in self.open) == bool(start)
            self.open.add(id)
            if end:
                self.open.discard(id)
            if wrong:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("wrong flags")))
            else:
                open = np.array([[len(self.open)]], np.int32)
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", open)]))
        return responses
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    for name, config in {"echo": IDENTITY, "sums": SUMS}.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    (repository / "sums" / "1" / "model.py").write_text(SUMS_MODEL)
    shutil.copytree(ROOT / "tests" / "models" / "repeat", repository / "stream")
    with ServerProcess(repository) as started:
        yield started


def run(capsys: pytest.CaptureFixture[str], model: str, url: str, **options: Any) -> tuple[int, str, str]:
    """Return the exit code and what was printed to both streams."""
    usual: dict[str, Any] = {"concurrency": "2", "duration": 0.5, "warmup": 0.05}
    with pytest.raises(typer.Exit) as raised:
        bench(model, url, **{**usual, **options})
    printed = capsys.readouterr()
    return raised.value.exit_code, printed.out, printed.err


def rows(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["runs"][-1]["points"]
    return found


def executed(server: ServerProcess, model: str) -> int:
    with urllib.request.urlopen(f"http://{server.url}/v2/models/{model}/stats") as response:
        return int(json.load(response)["model_stats"][0]["inference_stats"]["success"]["count"])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"concurrency": "1:4"},
        {"rate": "200", "distribution": "poisson"},
        {"shared_memory": "system", "shape": ["IN:1000"]},
        {"batch_size": 3, "shape": ["IN:70000"]},
        {"processes": 2, "input_values": "zero"},
        {"streaming": True},
    ],
    ids=str,
)
def test_every_kind_of_load_has_responses_only(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], protocol: str, options: dict[str, Any]
) -> None:
    before = executed(server, "echo")
    url = server.url if protocol == "http" else server.grpc_url
    code, out, err = run(capsys, "echo", url, as_json=True, **options)
    assert (code, err) == (0, "")
    found = rows(out)
    assert len(found) == (3 if options.get("concurrency") else 1)
    for row in found:
        assert row["completed"] > 0
        assert row["errors"] == {}
        assert 0 < row["latency"]["percentiles"]["50"] <= row["latency"]["percentiles"]["99"]
        assert row["server"]["requests"] > 0
        assert row["client"]["cpu_us"] > 0
    assert executed(server, "echo") - before >= sum(row["completed"] for row in found)


@pytest.mark.parametrize(("protocol", "streaming"), [("http", False), ("grpc", False), ("grpc", True)])
def test_sequences_have_ids_of_their_own_and_all_of_them_end(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], protocol: str, streaming: bool
) -> None:
    url = server.url if protocol == "http" else server.grpc_url
    for load in ({"concurrency": "5"}, {"rate": "300", "concurrency": "7"}):
        code, out, _ = run(
            capsys, "sums", url, sequence=True, sequence_length=3, streaming=streaming, as_json=True, **load
        )
        assert (code, rows(out)[0]["errors"]) == (0, {})
    parameters = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    with urllib.request.urlopen(f"http://{server.url}/v2/models/sums/infer", body) as response:
        assert json.load(response)["outputs"][0]["data"] == [0]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_streams_count_responses_and_the_time_to_the_first(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], protocol: str, tmp_path: Path
) -> None:
    (tmp_path / "data.json").write_text(json.dumps({"data": [{"IN": {"content": [4, 5, 6], "shape": [3]}}]}))
    url = server.url if protocol == "http" else server.grpc_url
    code, out, _ = run(capsys, "stream", url, streaming=True, input_values=str(tmp_path / "data.json"), as_json=True)
    [row] = rows(out)
    assert code == 0
    assert row["response_rate"] == pytest.approx(3 * row["rate"], rel=0.2)
    assert 0 < row["first_response"]["mean_us"] <= row["latency"]["mean_us"]


def test_regions_and_names_of_shared_memory_do_not_stay(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "echo", server.url, shared_memory="system")[0] == 0
    request = urllib.request.Request(f"http://{server.url}/v2/systemsharedmemory/status")
    with urllib.request.urlopen(request) as response:
        assert json.load(response) == []
    assert [name for name in os.listdir("/dev/shm") if name.startswith(f"naiad_bench_{os.getpid()}")] == []


def test_a_table_names_the_server_and_two_servers_stand_side_by_side(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "echo", server.url)
    assert code == 0
    assert out.startswith(f"echo at {server.url} (triton ")
    assert "in flight  requests/s" in out
    code, out, _ = run(capsys, "echo", server.url, against=server.grpc_url)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.split()[0] in ("A", "B", "B/A")] == ["A", "B", "B/A"]


def test_a_run_is_compared_with_an_earlier_one_and_drawn(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "before.json").write_text(run(capsys, "echo", server.url, as_json=True)[1])
    picture = str(tmp_path / "plot.png") if importlib.util.find_spec("matplotlib") else ""
    code, out, _ = run(capsys, "echo", server.url, against=str(tmp_path / "before.json"), png=picture)
    assert code == 0
    assert "B/A" in out
    if picture:
        assert Path(picture).read_bytes().startswith(b"\x89PNG")
    code, out, _ = run(capsys, "echo", server.url, as_csv=True)
    assert out.splitlines()[1].split(",")[1] == "2"


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("nothing", {}, "unknown model"),
        ("echo:7", {}, "version"),
        ("stream", {}, "give --streaming"),
        ("sums", {}, "give --sequence"),
        ("sums", {"sequence": True, "streaming": True}, "take --protocol grpc"),
        ("echo", {"batch_size": 9}, "batches of up to 8"),
        ("echo", {"against": "127.0.0.1:1"}, "no server responds at http://127.0.0.1:1"),
        ("echo", {"against": str(ROOT / "pyproject.toml")}, "is not what 'naiad bench --json' prints"),
        ("echo", {"against": "none.json"}, "--against: cannot read 'none.json'"),
        ("echo", {"input_values": "none.json"}, "cannot read 'none.json'"),
    ],
)
def test_what_cannot_be_measured_is_explained(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], model: str, options: dict[str, Any], words: str
) -> None:
    code, out, err = run(capsys, model, server.url, **options)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("error: ")


def test_a_load_that_cannot_begin_does_not_lose_the_loads_before(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = BenchContender.measure

    def gone_for_two(contender: BenchContender, level: BenchLevel, progress: Any) -> None:
        if level.connections == 2:
            raise ClientError("the server has gone")
        measure(contender, level, progress)

    monkeypatch.setattr(BenchContender, "measure", gone_for_two)
    code, out, err = run(capsys, "echo", server.url, concurrency="1:2")
    assert code == 2
    assert err == "error: the server has gone\n"
    assert out.splitlines()[2].split()[0] == "1"


def test_a_server_that_is_behind_is_seen_in_the_latencies(capsys: pytest.CaptureFixture[str]) -> None:
    """A request that was due and could not be sent counts all its waiting."""
    with _StandIn(responds=3) as stand_in:
        code, out, _ = run(
            capsys, "m", stand_in.url, rate="100", concurrency="1", duration=0.5, warmup=0.0, timeout=0.3, as_json=True
        )
    [row] = rows(out)
    assert code == 1
    assert row["unsent"] > 10
    assert next(iter(row["errors"])) == "no response within 0.3 s"
    assert row["latency"]["percentiles"]["90"] > 100_000


def test_a_server_without_binary_tensors_configuration_and_statistics_gets_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with _StandIn() as stand_in:
        code, out, _ = run(capsys, "m", stand_in.url, as_json=True)
        assert code == 0
        assert rows(out)[0]["server"] is None
        assert stand_in.bodies[-1]["inputs"][0]["data"] == [
            pytest.approx(0.844, abs=0.001),
            pytest.approx(0.758, abs=0.001),
        ]
        code, out, _ = run(capsys, "m", stand_in.url, header=["Authorization: Bearer x"])
        assert stand_in.headers[-1]["Authorization"] == "Bearer x"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_keyboard_ends_it_and_prints_what_was_measured(server: ServerProcess, number: int) -> None:
    before = executed(server, "echo")
    command = [sys.executable, "-m", "kernel", "bench", "echo", "-u", server.url, "-c", "2:64", "--duration=60"]
    command += ["--warmup=0", "--shared-memory=system"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as process:
        wait_for(lambda: executed(server, "echo") > before + 200)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped by the keyboard, after 2 in flight" in err
    assert "2 in flight: ended early by the keyboard" in out
    with urllib.request.urlopen(f"http://{server.url}/v2/systemsharedmemory/status") as response:
        assert json.load(response) == []


class _StandIn:
    """A KServe v2 server with one model and nothing else: no binary tensors, no configuration, no statistics."""

    def __init__(self, responds: int = 1 << 30) -> None:
        """After `responds` requests it is silent."""
        self.bodies: list[Any] = []
        self.headers: list[Any] = []
        self.left = responds
        self.silent = threading.Event()
        tensors = [{"name": "T", "datatype": "FP32", "shape": [2]}]
        #: The model's metadata, and the headers of responses beside their lengths.
        self.model: Any = {"name": "m", "inputs": tensors, "outputs": tensors}
        self.response_headers: dict[str, str] = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.respond({"/v2": {"name": "other"}, "/v2/models/m": outer.model}.get(self.path))

            def do_POST(self) -> None:
                outer.headers.append(self.headers)
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                outer.left -= 1
                if outer.left < 0:
                    outer.silent.wait(60)
                    return
                self.respond({"outputs": [{"name": "T", "datatype": "FP32", "shape": [2], "data": [1, 2]}]})

            def respond(self, document: Any) -> None:
                body = json.dumps(document or {"error": "not here"}).encode()
                self.send_response(200 if document else 404)
                for name, value in {"Content-Length": str(len(body)), **outer.response_headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> _StandIn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.silent.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_a_server_that_does_not_describe_its_tensors_is_measured_without_inputs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with _StandIn() as stand_in:
        stand_in.model = {"name": "m", "inputs": None}
        assert run(capsys, "m", stand_in.url)[0] == 0
        assert stand_in.bodies[-1]["inputs"] == []


@pytest.mark.parametrize("model", [[1], {"inputs": 5}, {"inputs": [{"name": "T"}]}, {"outputs": [7]}])
def test_metadata_of_something_else_is_explained(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with _StandIn() as stand_in:
        stand_in.model = model
        code, _, err = run(capsys, "m", stand_in.url)
        assert (code, err.count("\n")) == (2, 1)
        assert "does not describe a model" in err


def test_a_response_that_cannot_be_read_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with _StandIn() as stand_in:
        stand_in.response_headers = {"Inference-Header-Content-Length": "many"}
        code, _, err = run(capsys, "m", stand_in.url)
        assert (code, err.count("\n")) == (2, 1)
        assert "is not JSON of an inference server" in err


def test_a_port_where_nothing_listens_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code, _, err = run(capsys, "m", f"127.0.0.1:{port}")
    assert code == 2
    assert "no server responds" in err
