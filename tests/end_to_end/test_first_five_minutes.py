"""README's first five minutes, typed into terminals by somebody who reads what the screen shows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.server import free_ports
from kernel.options import DEMO_REPOSITORY
from tests.docs.documents import code_blocks, document, section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
README = document("README.md")

#: Sequences that control a terminal, and what `print` sends at the end of a line.
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")

TIMEOUT_S = 50
PROMPT = "ready> "


class Terminal:
    """A shell in a terminal of 100 columns, and what it has shown."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self._shell = subprocess.Popen(
            ["/bin/sh", "-i"],
            cwd=folder,
            env={**environment, "PS1": PROMPT, "TERM": "xterm-256color", "ENV": "/dev/null"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._shown = b""
        self.read_until(PROMPT)

    def type(self, line: str) -> None:
        os.write(self._master, f"{line}\n".encode())

    def press_control_c(self) -> None:
        os.write(self._master, b"\x03")

    def read_until(self, text: str) -> str:
        """Return what is shown from now on, to the end of `text`."""
        end_s = time.monotonic() + TIMEOUT_S
        while text not in (shown := _CONTROL.sub(b"", self._shown).decode(errors="replace")):
            if not select.select([self._master], [], [], max(0, end_s - time.monotonic()))[0]:
                raise TimeoutError(f"the terminal does not show {text!r}, but:\n{shown}")
            self._shown += os.read(self._master, 65536)
        seen, _, rest = shown.partition(text)
        self._shown = rest.encode()
        return seen + text

    def run(self, line: str) -> str:
        """Type a command and return what it shows, without the line itself."""
        self.type(line)
        self.read_until("\n")
        return self.read_until(PROMPT).removesuffix(PROMPT)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, 9)
        self._shell.wait(60)
        os.close(self._master)


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Callable[[], Terminal]]:
    """Return a function that opens a terminal in a folder like a checkout, with `naiad` in the path and free ports."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "naiad").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kernel "$@"\n')
    (programs / "naiad").chmod(0o755)
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "kernel").symlink_to(ROOT / "kernel")
    ports = dict(zip(("http", "grpc", "metrics", "openai"), free_ports(4), strict=True))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("NAIAD_")},
        **{f"NAIAD_{door.upper()}_PORT": str(port) for door, port in ports.items() if door != "openai"},
        "OPENAI_PORT": str(ports["openai"]),
        "NAIAD_HTTP_ADDRESS": "127.0.0.1",
        "NAIAD_GRPC_ADDRESS": "127.0.0.1",
        "NAIAD_URL": f"127.0.0.1:{ports['http']}",
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    with contextlib.ExitStack() as stack:

        def open_terminal() -> Terminal:
            terminal = Terminal(checkout, environment)
            stack.callback(terminal.close)
            return terminal

        yield open_terminal


def commands(heading: str, beginning: str) -> list[str]:
    """Return the commands of a section that begin so, without comments."""
    lines = re.findall(rf"^    ({re.escape(beginning)}.*)$", section(README, heading), re.MULTILINE)
    return [line.partition("  #")[0].strip() for line in lines]


def test_the_first_five_minutes(open_terminal: Callable[[], Terminal], tmp_path: Path) -> None:
    server, client = open_terminal(), open_terminal()
    [run] = commands("Start", "naiad")
    server.type(run)
    shown = server.read_until("Ctrl-C stops the server.")
    assert "READY" in shown
    # The hint has the port of this server, and is typed as it stands.
    [hint] = re.findall(r"^    (curl .*/infer -d .*)$", shown, re.MULTILINE)
    assert '"model_name":"digits"' in client.run(hint)
    [hint] = re.findall(r"^    (\S+(?: -m kernel)? infer add_sub .*)$", shown, re.MULTILINE)
    assert "11, 22, 33, 44" in client.run(hint)

    [curl] = commands("The first request", "curl")
    port = re.search(r"http://localhost:(\d+)/", shown)
    assert port is not None
    assert '"model_name":"digits"' in client.run(curl.replace("localhost:8000", f"localhost:{port[1]}"))
    add, count = commands("The first request", "naiad infer")
    assert "-9, -18, -27, -36" in client.run(add)
    assert client.run(count).count("number = ") == 5

    server.press_control_c()
    stopped = server.read_until(PROMPT)
    assert "Stopped: every accepted request got its response" in stopped
    assert "Traceback" not in stopped
    assert "no server responds at" in client.run(add)


SLOW = """
import pathlib
import time

class TritonPythonModel:
    def initialize(self, args):
        while not (pathlib.Path(args["model_repository"]) / "gate").exists():
            time.sleep(0.01)

    def execute(self, requests):
        return []
"""


def test_a_terminal_shows_a_bar_as_long_as_models_load(open_terminal: Callable[[], Terminal], tmp_path: Path) -> None:
    model = tmp_path / "checkout" / "models" / "slow"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text('backend: "python"\noutput { name: "OUT" data_type: TYPE_INT32 dims: 1 }\n')
    (model / "1" / "model.py").write_text(SLOW)
    terminal = open_terminal()
    terminal.type("naiad run models")
    terminal.read_until('"loading: slow:1"')
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in terminal.read_until("0 of 1 models loaded; loading 'slow'")
    (model / "gate").touch()
    assert "READY" in terminal.read_until("Started Metrics Service")
    terminal.press_control_c()
    terminal.read_until(PROMPT)


SERVICE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [3]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [3]})
        return config

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", each * 2)]) for each in inputs]
"""


def test_models_of_ones_own(open_terminal: Callable[[], Terminal], tmp_path: Path) -> None:
    folder, chat, file, trees, code, listing, check, usage, *_ = commands("Your own models", "naiad")
    shutil.copytree(DEMO_REPOSITORY / "add_sub", tmp_path / "checkout/models/add_sub")
    shutil.copy(DEMO_REPOSITORY / "digits/1/model.onnx", tmp_path / "checkout/resnet.onnx")
    (tmp_path / "checkout/service.py").write_text(SERVICE)
    [training] = code_blocks(document("docs/trees.md"), "python")
    subprocess.run([sys.executable, "-c", training.text], cwd=tmp_path / "checkout", check=True)
    terminal, client = open_terminal(), open_terminal()
    assert "add_sub" in terminal.run(listing)
    assert "add_sub" in terminal.run(check)
    assert "--model-repository" in terminal.run(usage)
    terminal.type(f"{chat} --openai-port=$OPENAI_PORT")
    [hint] = re.findall(r"^    (curl -N .*)$", terminal.read_until("Ctrl-C stops the server."), re.MULTILINE)
    assert client.run(hint).rstrip().endswith("data: [DONE]")
    terminal.press_control_c()
    terminal.read_until(PROMPT)
    for command, model in ((folder, "add_sub"), (file, "resnet"), (trees, "cancer"), (code, "service")):
        terminal.type(command)
        shown = terminal.read_until("Ctrl-C stops the server.")
        assert re.search(rf"\| {model} +\| 1 +\| READY", shown), shown
        # What is shown at the end of the start is typed as it stands.
        [hint] = re.findall(rf"^    (\S+(?: -m kernel)? infer {model} .*)$", shown, re.MULTILINE)
        assert re.search(r"^\w+  FP32 ", client.run(hint))
        for hint in re.findall(r"^    (curl .*/infer -d .*)$", shown, re.MULTILINE):
            assert f'"model_name":"{model}"' in client.run(hint)
        terminal.press_control_c()
        terminal.read_until(PROMPT)
