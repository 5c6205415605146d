"""`naiad infer` of decoupled models: all datatypes over gRPC, the others over HTTP, errors and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bench.server import ServerProcess, free_ports, wait_for
from kernel.tools import infer as servers
from kernel.tools.infer import infer_and_print
from kernel.tools.infer_arguments import GivenInput
from protocols.clients.grpc_client import GrpcInferServer

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = """
backend: "python"
model_transaction_policy {{ decoupled: true }}
input [{{ name: "IN" data_type: {datatype} dims: [-1] }}]
output [{{ name: "OUT" data_type: {datatype} dims: [-1] }}, {{ name: "NUMBER" data_type: TYPE_INT32 dims: [1] }}]
"""

# Sends the input once for each of its elements.
REPEATS = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            for number in range(len(value)):
                outputs = [pb_utils.Tensor("OUT", value), pb_utils.Tensor("NUMBER", np.array([number], np.int32))]
                sender.send(pb_utils.InferenceResponse(outputs))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

# Sends one response, and the second one never, or an error where the input begins with 0.
WAITS = """
import numpy as np, time

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            outputs = [pb_utils.Tensor("OUT", value), pb_utils.Tensor("NUMBER", np.array([1], np.int32))]
            sender.send(pb_utils.InferenceResponse(outputs))
            if not value[0]:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no more")))
            else:
                while not request.is_cancelled():
                    time.sleep(0.005)
                print("was cancelled", flush=True)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

MODELS = {
    "half": ("TYPE_FP16", REPEATS),
    "single": ("TYPE_FP32", REPEATS),
    "text": ("TYPE_STRING", REPEATS),
    "waits": ("TYPE_FP32", WAITS),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    for name, (datatype, code) in MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(CONFIG.format(datatype=datatype))
        (repository / name / "1" / "model.py").write_text(f"import triton_python_backend_utils as pb_utils\n{code}")
    (repository / "same" / "1").mkdir(parents=True)
    (repository / "same" / "config.pbtxt").write_text(
        'backend: "identity"\ninput [{ name: "INPUT" data_type: TYPE_BF16 dims: [-1] }]\n'
        'output [{ name: "OUTPUT" data_type: TYPE_BF16 dims: [-1] }]\n'
    )
    with ServerProcess(repository) as server:
        yield server


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kernel", "infer", *arguments]


def naiad(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("model", "value", "lines"),
    [
        ("half", "[0.5,65504]", ["OUT = [0.5, 65504], NUMBER = 0", "OUT = [0.5, 65504], NUMBER = 1"]),
        ("single", '["nan"]', ["OUT = nan, NUMBER = 0"]),
        ("text", '["a\\u001b"]', ["OUT = a\\u001b, NUMBER = 0"]),
        ("single", "[]", []),
    ],
)
def test_a_stream_over_grpc_has_all_datatypes(server: ServerProcess, model: str, value: str, lines: list[str]) -> None:
    done = naiad(model, f"IN={value}", f"--url={server.grpc_url}")
    assert (done.stdout.splitlines(), done.stderr, done.returncode) == (lines, "", 0)


def test_a_model_with_one_response_is_shown_over_grpc_as_over_http(server: ServerProcess) -> None:
    shown = {naiad("same", "INPUT=[0.5,2]", f"--url={url}").stdout for url in (server.url, f"grpc://{server.grpc_url}")}
    assert shown == {"OUTPUT  BF16 2\n  0.5, 2\n"}


def test_over_http_a_stream_looks_the_same_if_json_has_its_datatypes(server: ServerProcess) -> None:
    for model, value in (("single", "[1.5,2]"), ("text", '["a b"]')):
        over_http, over_grpc = (naiad(model, f"IN={value}", f"--url={url}") for url in (server.url, server.grpc_url))
        assert over_http.returncode == 0, over_http.stderr
        assert over_http.stdout
        assert over_http.stdout == over_grpc.stdout


@pytest.mark.parametrize("over_grpc", [False, True], ids=["HTTP", "gRPC"])
def test_for_programs_each_response_of_a_stream_is_a_line_of_json(server: ServerProcess, over_grpc: bool) -> None:
    url = server.grpc_url if over_grpc else server.url
    done = naiad("single", "IN=[1.5,2]", "--json", f"--url={url}")
    assert (done.stderr, done.returncode) == ("", 0)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [{each["name"]: each["data"] for each in one["outputs"]} for one in found] == [
        {"OUT": [1.5, 2], "NUMBER": [0]},
        {"OUT": [1.5, 2], "NUMBER": [1]},
    ]
    assert {(one["model_name"], tuple(one["outputs"][0]["shape"])) for one in found} == {("single", (2,))}


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        ("half", ["IN=1"], "input 'IN' is FP16, and over HTTP a stream of responses is JSON, which has no form for it; "
         "give the address of the server's gRPC port: --url HOST:PORT"),
        ("single", ["IN=1", "-c3"], "--classes: over HTTP a stream of responses has no classes; give the address of"),
    ],
)  # fmt: skip
def test_what_http_cannot_stream_is_said_with_the_next_step(
    server: ServerProcess, model: str, arguments: list[str], said: str
) -> None:
    done = naiad(model, *arguments, f"--url={server.url}")
    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.count("\n") == 1


def test_the_usual_grpc_port_is_found_from_the_usual_http_port(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(servers.GRPC_PORTS, server.http_port, server.grpc_port)
    infer_and_print(server.url, "half", ["IN=0.5"], 0)
    assert capsys.readouterr() == ("OUT = 0.5, NUMBER = 0\n", "")
    monkeypatch.setitem(servers.GRPC_PORTS, server.http_port, free_ports(1)[0])
    infer_and_print(server.url, "single", ["IN=0.5"], 0)
    assert capsys.readouterr().out == "OUT = 0.5, NUMBER = 0\n"


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        ("nobody", ["IN=1"], "'nobody' is not found; the server has half, same, single, text, waits"),
        ("half", ["X=1"], "model 'half' has no input 'X'; it takes IN (FP16 [-1])"),
        ("half:7", ["IN=1"], "the server returned NOT_FOUND: "),
        ("waits", ["IN=0"], "error: no more"),
    ],
)
def test_a_mistake_over_grpc_is_one_line(server: ServerProcess, model: str, arguments: list[str], said: str) -> None:
    done = naiad(model, *arguments, f"--url={server.grpc_url}")
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("grpc://127.0.0.1:{free}", "no server responds to gRPC at 127.0.0.1:{free}: Connection refused. Start one"),
        ("grpc://127.0.0.1:{http}", "127.0.0.1:{http} has ended the connection: "),
        ("grpc://127.0.0.1", "'grpc://127.0.0.1' is not an address of a server: give HOST:PORT"),
        ("grpc://127.0.0.1:x", "'grpc://127.0.0.1:x' is not an address of a server: "),
    ],
)
def test_a_wrong_grpc_address_is_one_line(server: ServerProcess, address: str, said: str) -> None:
    ports = {"free": free_ports(1)[0], "http": server.http_port}
    done = naiad("half", "IN=1", f"--url={address.format(**ports)}")
    assert done.returncode == 1
    assert said.format(**ports) in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_control_c_ends_a_stream_and_cancels_the_request(server: ServerProcess, protocol: str) -> None:
    url = server.grpc_url if protocol == "grpc" else server.url
    before = server.log.count("was cancelled")
    # A shell starts its jobs in the background with SIGINT ignored, and the tests may be one.
    arguments = ["env", "--default-signal=INT", *command("waits", "IN=1", f"--url={url}")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "NUMBER = 1" in process.stdout.readline(), "responses are printed as they come"
            os.kill(process.pid, signal.SIGINT)
            shown, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (shown, said.strip(), process.returncode) == ("", "", 130)
    wait_for(lambda: server.log.count("was cancelled") > before)


def test_control_c_between_the_steps_of_asyncio_ends_a_stream_too(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncio.Runner.run` makes its task first and looks at the handler of SIGINT then: the task waits already."""
    before = server.log.count("was cancelled")
    client = GrpcInferServer("127.0.0.1", server.grpc_port, tls=False, model="waits", version="")
    responses = client.responses([GivenInput("IN", "FP32", [1], [1.0], np.float32(1).tobytes())], [])
    try:
        next(responses)
        with monkeypatch.context() as interrupt:
            interrupt.setattr(signal, "getsignal", raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(responses)
    finally:
        client.close()
    wait_for(lambda: server.log.count("was cancelled") > before)


def raise_interrupt(number: int) -> None:
    assert number == signal.SIGINT
    raise KeyboardInterrupt
