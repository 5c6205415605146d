"""The command line as somebody at a terminal sees it."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tritonclient.grpc as triton

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

#: So that no server in another process is in the way.
FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


def naiad(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kernel", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def json_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines that are complete: the server may be writing the next one."""
    return [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--no-such-flag"), "--no-such-flag"),
        (("run", "--http-port=many"), "--http-port: 'many' is not a whole number"),
        (("tritonserver", "--http-port=many"), "--http-port: 'many' is not a whole number"),
        (("run", "--allow-http=perhaps"), "neither true nor false"),
        (("run", "--model-control-mode=fast"), "not one of none, explicit, poll"),
        (("run", "--model-repository=/no/such/folder"), "/no/such/folder"),
        (("run", "--load-model=a"), "--model-control-mode=explicit"),
        (("run", "--http-port=8000", "--grpc-port=8000"), "same address and port 0.0.0.0:8000"),
        (("run", "--log-file=/no/such/folder/log"), "--log-file '/no/such/folder/log' cannot be written"),
        (("run", "--http-restricted-api=weather:a=b", *FREE_PORTS), "unknown restricted api 'weather'"),
        (("run", "--grpc-header-forward-pattern=(", *FREE_PORTS), "is not a regular expression"),
        (("run", "--http-cors-origin=x", *FREE_PORTS), "--http-cors-origin: 'x' is not an origin"),
        (("run", "--metrics-config=x"), "--metrics-config option format is <setting>=<value>. Got x"),
        (("run", "--host-policy=a,b=c", *FREE_PORTS), "Unsupported host policy setting 'b' is specified"),
        (("run", "--http-use-ssl=true", "--http-server-cert=/no/c", "--http-server-key=/no/k", *FREE_PORTS),
         "'/no/c' cannot be read"),
        (("fly",), "fly"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_command_is_said_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = naiad(*arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_wrong_option_of_a_front_door_ends_the_start_without_waiting_for_models(write_model: WriteModel) -> None:
    source = """
        import time

        class TritonPythonModel:
            def initialize(self, args):
                time.sleep(3600)
    """
    repository = write_model("never", "input { name: \"I\" data_type: TYPE_FP32 dims: 1 }\n"
                             "output { name: \"O\" data_type: TYPE_FP32 dims: 1 }", source)  # fmt: skip
    done = naiad("run", f"--model-repository={repository}", "--http-cors-origin=x", *FREE_PORTS)
    assert done.returncode == 1
    assert "'x' is not an origin" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = naiad("run", "--http-address=127.0.0.1", f"--http-port={port}", "--grpc-port=0", "--metrics-port=0")
    assert done.returncode == 1
    assert done.stderr == (
        f"error: failed to start HTTP service: Unavailable - Socket '127.0.0.1:{port}' already in use. "
        "Choose another port with --http-port\n"
    )


def test_help_names_every_command_and_flag_group() -> None:
    assert all(word in naiad("--help").stdout for word in ("run", "models", "infer"))
    assert all(word in naiad("run", "--help").stdout for word in ("--model-repository", "HTTP", "gRPC", "Metrics"))


def test_flags_without_effect_are_accepted_and_each_is_named_in_the_log() -> None:
    flags = ("--http-thread-count=4", "--cache-directory=/tmp", "--buffer-manager-thread-count", "1")
    with ServerProcess(None, *flags, "--trace-config=rate=7", "--trace-config=level=TENSORS") as server:
        status, body = server.get("/v2/trace/setting")
        warnings = [line for line in server.log.splitlines() if line.startswith("W")]
    assert (status, json.loads(body)["trace_rate"]) == (200, "7")
    named = ["--http-thread-count", "--cache-directory", "--buffer-manager-thread-count", "--trace-config"]
    assert [next((name for name in named if name in line), line) for line in warnings] == named


def test_a_server_that_logs_json_prints_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "talker" / "1").mkdir(parents=True)
    (tmp_path / "talker" / "config.pbtxt").write_text(
        'backend: "python"\noutput { name: "X" data_type: TYPE_INT32 dims: 1 }\n'
    )
    (tmp_path / "talker" / "1" / "model.py").write_text(
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        "        print('hello\\x1b[2J')\n"
        "    def execute(self, requests):\n"
        "        return []\n"
    )
    log = tmp_path / "server.log"
    flags = ("--log-format=json", "--log-access=true", f"--log-file={log}")
    with subprocess.Popen(
        [sys.executable, "-m", "kernel", "run", f"--model-repository={tmp_path}", "--http-address=127.0.0.1",
         "--allow-grpc=false", "--allow-metrics=false", "--http-port=0", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            wait_for(lambda: log.exists() and "Started HTTPService" in log.read_text())
            messages = [line["message"] for line in json_lines(log)]
            [started] = [each for each in messages if each.startswith("Started HTTPService at 127.0.0.1:")]
            port = started.rpartition(":")[2]
            body = urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/logging", timeout=60).read()
        finally:
            process.terminate()
            printed = process.communicate(timeout=60)[0]
    assert json.loads(body)["log_format"] == "json"
    assert (process.returncode, printed) == (0, b"")
    lines = json_lines(log)
    hello = next(line for line in lines if "hello" in line["message"])
    assert (hello["message"], hello["model"], hello["version"]) == ("talker: hello\x1b[2J", "talker", "1")
    access = next(line for line in lines if line["logger"] == "access")
    assert (access["method"], access["path"], access["status"]) == ("GET", "/v2/logging", "200")


def test_calls_are_logged_where_that_is_asked_for() -> None:
    with ServerProcess(None, "--log-access=true") as server:
        server.get("/v2/models/add_sub")
        with triton.InferenceServerClient(server.grpc_url) as client:
            assert client.is_server_live()
        wait_for(lambda: "ServerLive OK" in server.log)
        log = server.log
    assert " GET /v2/models/add_sub 200 in=0 out=" in log
    assert " gRPC /inference.GRPCInferenceService/ServerLive OK in=5 out=" in log


def test_verbose_lines_of_models_appear_as_soon_as_a_client_asks_for_them(write_model: WriteModel) -> None:
    repository = write_model(
        "talker",
        'output { name: "X" data_type: TYPE_INT32 dims: 1 }\n',
        """
        class TritonPythonModel:
            def execute(self, requests):
                pb_utils.Logger.log_verbose("in detail")
                pb_utils.Logger.log_info("done")
                tensor = pb_utils.Tensor("X", np.zeros(1, np.int32))
                return [pb_utils.InferenceResponse([tensor]) for _ in requests]
        """,
    )
    with ServerProcess(repository) as server, triton.InferenceServerClient(server.grpc_url) as client:
        client.infer("talker", [])
        wait_for(lambda: server.log.count("done") == 1)
        assert "in detail" not in server.log
        client.update_log_settings({"log_verbose_level": 1})
        client.infer("talker", [])
        wait_for(lambda: "in detail" in server.log)


def test_models_lists_a_repository_and_says_what_is_wrong(tmp_path: Path) -> None:
    for name, text in (("good", 'backend: "identity"\n'), ("bad", "max_batch_size: many\n")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(text)
    done = naiad("models", str(tmp_path))
    assert done.returncode == 1
    assert "config.pbtxt:1:17" in done.stdout
    good = next(line for line in done.stdout.splitlines() if "good" in line)
    assert "valid" in good


def test_models_makes_the_requests_of_a_warm_up_as_a_load_does(tmp_path: Path) -> None:
    sample = 'name: "w" batch_size: 1 inputs { key: "%s" value { data_type: TYPE_FP32 dims: [1] %s: %s } }'
    for name, warmup in (
        ("good", sample % ("X", "zero_data", "true")),
        ("misspelt", sample % ("x", "zero_data", "true")),
        ("missing", sample % ("X", "input_data_file", '"none"')),
    ):
        (tmp_path / name / "1").mkdir(parents=True)
        tensors = "".join(f'{kind} [{{ name: "X" data_type: TYPE_FP32 dims: [1] }}]\n' for kind in ("input", "output"))
        text = f'backend: "identity"\n{tensors}model_warmup [{{ {warmup} }}]\n'
        (tmp_path / name / "config.pbtxt").write_text(text)
    done = naiad("models", str(tmp_path), "--json")
    reasons = {each["name"]: each["reason"] for each in json.loads(done.stdout)}
    assert (done.returncode, reasons["good"]) == (1, "")
    assert "in warmup sample 'w', which has 'x'; the inputs of the model are 'X'" in reasons["misspelt"]
    assert "missing/warmup/none: No such file or directory" in reasons["missing"]


def test_the_demo_models_are_valid() -> None:
    done = naiad("models")
    assert done.returncode == 0, done.stdout
    assert all(name in done.stdout for name in ("digits", "add_sub", "count"))


@pytest.fixture(scope="module")
def demo() -> object:
    with ServerProcess(None) as server:
        yield server


def test_the_demo_says_what_to_type_and_that_works(demo: ServerProcess) -> None:
    wait_for(lambda: "Ctrl-C stops the server" in demo.log)
    line = next(line for line in demo.log.splitlines() if line.strip().startswith("curl") and "digits/infer" in line)
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=30, check=True)
    assert '"model_name":"digits"' in done.stdout


def test_infer_prints_outputs(demo: ServerProcess) -> None:
    done = naiad("infer", "add_sub", "INPUT0=[1,2,3,4]", "INPUT1=[10,20,30,40]", f"--url=http://{demo.url}")
    assert done.returncode == 0, done.stderr
    assert "11, 22, 33, 44" in done.stdout
    assert "-9, -18, -27, -36" in done.stdout


def test_infer_prints_labels(demo: ServerProcess, tmp_path: Path) -> None:
    import numpy as np

    sample = json.loads((Path(__file__).parents[2] / "kernel/demo/digit.json").read_text())["inputs"][0]
    np.save(tmp_path / "digit.npy", np.array(sample["data"], np.float32).reshape(sample["shape"]))
    done = naiad("infer", "digits", f"{sample['name']}=@{tmp_path}/digit.npy", f"--url=http://{demo.url}")
    assert done.returncode == 0, done.stderr
    labels = (Path(__file__).parents[2] / "kernel/demo/digits/labels.txt").read_text().split()
    assert any(label in done.stdout for label in labels)


def test_infer_streams_what_a_decoupled_model_sends(demo: ServerProcess) -> None:
    done = naiad("infer", "count", "limit=3", f"--url=http://{demo.url}")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) == 3


def test_infer_says_what_a_model_takes(demo: ServerProcess) -> None:
    done = naiad("infer", "add_sub", "WRONG=1", f"--url=http://{demo.url}")
    assert done.returncode == 1
    assert "INPUT0" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:9", "no server responds at http://127.0.0.1:9: Connection refused. Start one with 'naiad run'"),
        ("127.0.0.1:{metrics_port}", "is not the HTTP port of an inference server: its response is not JSON"),
        ("127.0.0.1:http", "'http://127.0.0.1:http' is not an address: nonnumeric port: 'http'"),
        ("ftp://127.0.0.1", "'ftp://127.0.0.1' is not an address of a server: give HOST:PORT"),
        ("no-such-host.invalid:8000", "no server responds at http://no-such-host.invalid:8000: "),
    ],
)
def test_infer_says_in_one_line_what_is_wrong_with_an_address(demo: ServerProcess, address: str, said: str) -> None:
    url = address.format(metrics_port=demo.metrics_port)
    done = naiad("infer", "add_sub", "INPUT0=1", f"--url={url}")
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_infer_takes_the_address_from_the_environment(demo: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAIAD_URL", demo.url)
    assert naiad("infer", "count", "limit=1").returncode == 0


@pytest.mark.parametrize("command", [(), ("run",), ("models",), ("infer",), ("version",)])
def test_every_command_explains_itself(command: tuple[str, ...]) -> None:
    short, long = naiad(*command, "-h"), naiad(*command, "--help")
    assert (short.returncode, short.stderr) == (0, "")
    assert short.stdout == long.stdout
    assert "naiad" in short.stdout


def test_the_version_is_printed_where_people_look_for_it() -> None:
    assert naiad("--version").stdout == f"naiad {naiad('version').stdout}"


def test_flags_are_environment_variables_and_a_variable_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAIAD_ID", "from the environment")
    monkeypatch.setenv("NAIAD_HTTP_PROT", "8000")
    with ServerProcess(None) as server:
        assert json.loads(server.get("/v2")[1])["name"] == "from the environment"
        server.wait_for_log("NAIAD_HTTP_PROT has no effect: it stands for no flag; did you mean NAIAD_HTTP_PORT?")


def test_the_hint_of_the_demo_works_in_a_shell_that_expands_brackets(demo: ServerProcess) -> None:
    wait_for(lambda: "Ctrl-C stops the server" in demo.log)
    [line] = [line.strip() for line in demo.log.splitlines() if " infer add_sub " in line]
    words = shlex.split(line)
    assert words[-1] == f"http://localhost:{demo.http_port}"
    assert shutil.which("zsh") is None or subprocess.run(["zsh", "-n", "-c", line], check=False).returncode == 0
    done = naiad(*words[words.index("infer") :])
    assert "11, 22, 33, 44" in done.stdout, done.stderr
