"""The command line as somebody at a terminal sees it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.server import ServerProcess, wait_for


def naiad(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kernel", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--no-such-flag"), "--no-such-flag"),
        (("run", "--http-port=many"), "--http-port"),
        (("run", "--allow-http=perhaps"), "neither true nor false"),
        (("run", "--model-control-mode=poll"), "none of none, explicit"),
        (("run", "--model-repository=/no/such/folder"), "/no/such/folder"),
        (("run", "--load-model=a"), "--model-control-mode=explicit"),
        (("run", "--http-port=8000", "--grpc-port=8000"), "same address and port"),
        (("fly",), "fly"),
    ],
)
def test_what_is_wrong_with_a_command_is_said_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = naiad(*arguments)
    assert done.returncode != 0
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = naiad("run", "--http-address=127.0.0.1", f"--http-port={port}", "--grpc-port=0", "--metrics-port=0")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert str(port) in lines[0]


def test_help_names_every_command_and_flag_group() -> None:
    assert all(word in naiad("--help").stdout for word in ("run", "models", "infer"))
    assert all(word in naiad("run", "--help").stdout for word in ("--model-repository", "HTTP", "gRPC", "Metrics"))


def test_models_lists_a_repository_and_says_what_is_wrong(tmp_path: Path) -> None:
    for name, text in (("good", 'backend: "identity"\n'), ("bad", "max_batch_size: many\n")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(text)
    done = naiad("models", str(tmp_path))
    assert done.returncode == 1
    assert "config.pbtxt:1:17" in done.stdout
    good = next(line for line in done.stdout.splitlines() if "good" in line)
    assert "valid" in good


def test_the_demo_models_are_valid() -> None:
    done = naiad("models")
    assert done.returncode == 0, done.stdout
    assert all(name in done.stdout for name in ("digits", "add_sub", "count"))


@pytest.fixture(scope="module")
def demo() -> object:
    with ServerProcess(None) as server:
        yield server


def test_the_demo_says_what_to_type_and_that_works(demo: ServerProcess) -> None:
    wait_for(lambda: "Ctrl-C ends the server" in demo.log)
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

    from kernel.client import read_value

    sample = read_value((Path(__file__).parents[2] / "kernel/demo/digit.json").read_text())["inputs"][0]
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


def test_infer_says_how_to_start_a_server() -> None:
    done = naiad("infer", "add_sub", "--url=http://127.0.0.1:9")
    assert done.returncode == 1
    assert "python -m kernel run" in done.stderr
