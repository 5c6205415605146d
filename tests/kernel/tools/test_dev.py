"""`naiad dev`: one model for its author, at a terminal.

A model is loaded again when its files have changed and are quiet.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import BadOption
from kernel.repository.layout import Entry
from kernel.tools.dev import QUIET_NS, ChangeWatch, dev_options, files_of, for_author
from kernel.tools.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters { key: "naiad.execution_timeout" value { string_value: "1" } }
"""

SOURCE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        print("executing", len(requests))
        (request,) = requests
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if given[0] == 7:
            breakpoint()
        if given[0] == 9:
            given = given.reshape(3, 5)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given * 2)])]
"""


class DevSession:
    """The command at a pseudo-terminal, as its author sees it."""

    def __init__(self, model: Path, *, stdin: int | None = None) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "kernel", "dev", str(model), "--http-port=0", "--grpc-port=0",
                   "--allow-metrics=false"]  # fmt: skip
        environment = os.environ | {"TERM": "dumb", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=slave if stdin is None else stdin,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment,
        )
        os.close(slave)
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def read(self, until: str, timeout_s: float = 60) -> str:
        """Wait until the terminal shows a text, and return what it shows up to there, which is not shown again."""
        deadline = time.monotonic() + timeout_s
        while until not in self._text:
            ready = select.select([self._master], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, f"the terminal does not show {until!r}, but:\n{self._text}"
            # A character, or the end of a line, may come in two parts.
            self._text += self._decoder.decode(os.read(self._master, 65536))
            self._text = self._text.replace("\r\n", "\n")
        before, found, self._text = self._text.partition(until)
        return before + found

    def write(self, line: str) -> None:
        os.write(self._master, f"{line}\n".encode())

    def infer(self, port: str, *values: float, name: str = "double") -> Any:
        """Return the output of a request, or the text of its error."""
        body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [len(values)], "data": values}]}
        url = f"http://localhost:{port}/v2/models/{name}/infer"
        try:
            with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=50) as response:
                return json.load(response)["outputs"][0]["data"]
        except urllib.error.HTTPError as error:
            return json.load(error)["error"]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "double"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(SOURCE)
    return folder


@pytest.fixture
def session(model: Path) -> Iterator[DevSession]:
    session = DevSession(model)
    yield session
    session.close()


def test_an_author_saves_fixes_and_debugs_a_model_at_one_terminal(session: DevSession, model: Path) -> None:
    start = session.read("Ctrl-C ends.")
    match = re.search(r"http localhost:(\d+)", start)
    assert match is not None, start
    port, file = match[1], model / "1" / "model.py"
    assert f"infer double 'IN=[1]' --url http://localhost:{port}" in start
    assert "breakpoint() stops here" in start

    # What the model prints is on the terminal as it is.
    assert session.infer(port, 1, 2) == [2, 4]
    session.read("executing 1\n")

    # A breakpoint has the terminal, and no limit ends the model meanwhile.
    responses: list[object] = []
    caller = threading.Thread(target=lambda: responses.append(session.infer(port, 7, 1)))
    caller.start()
    session.read("(Pdb) ")
    session.write("p given.sum() + 1000")
    assert "1008.0" in session.read("(Pdb) ")
    time.sleep(2.5)  # longer than the model's own limit, at which the server looks twice a second
    session.write("continue")
    caller.join()
    assert responses == [[14, 2]]

    # An exception is shown with the model's own lines; the client has Triton's text.
    assert "cannot reshape" in session.infer(port, 9)
    shown = session.read("given.reshape(3, 5)")
    assert "ValueError: cannot reshape array" in shown
    assert "1/model.py:13 in execute" in shown

    # A saved file is loaded at once; one that cannot be loaded leaves the old version.
    file.write_text(SOURCE.replace("* 2", "* 3"))
    session.read("saved double/1/model.py: loading")
    session.read("loaded in")
    assert session.infer(port, 1) == [3]
    file.write_text(SOURCE.replace("* 2", "* * 2"))
    assert "SyntaxError: invalid syntax" in session.read("double does not load")
    session.read("still serves")
    assert session.infer(port, 1) == [3]
    file.write_text(SOURCE.replace("* 2", "* 4"))
    session.read("loaded in")
    assert session.infer(port, 1) == [4]

    session.process.send_signal(signal.SIGINT)
    assert session.process.wait(60) == 0


def test_an_ensemble_is_loaded_again_when_a_model_of_its_steps_is_saved(model: Path) -> None:
    (model / "config.pbtxt").write_text(CONFIG)
    ensemble = model.parent / "steps"
    (ensemble / "1").mkdir(parents=True)
    tensors = CONFIG.replace('backend: "python"', "").partition("parameters")[0]
    step = 'step [ { model_name: "double" model_version: -1 input_map { key: "IN" value: "IN" }'
    step += ' output_map { key: "OUT" value: "OUT" } } ]'
    (ensemble / "config.pbtxt").write_text(f'platform: "ensemble"\n{tensors}ensemble_scheduling {{ {step} }}\n')
    session = DevSession(ensemble)
    try:
        match = re.search(r"http localhost:(\d+)", session.read("Ctrl-C ends."))
        assert match is not None
        assert session.infer(match[1], 1, name="steps") == [2]
        (model / "1" / "model.py").write_text(SOURCE.replace("* 2", "* 3"))
        text = session.read("loaded in")
        assert "saved double/1/model.py: loading" in text
        assert session.infer(match[1], 1, name="steps") == [3]
    finally:
        session.close()


def test_a_model_that_does_not_load_at_first_loads_when_it_is_saved(model: Path) -> None:
    file = model / "1" / "model.py"
    file.write_text("import nothing_of_this_name\n")
    session = DevSession(model)
    try:
        text = session.read("Ctrl-C ends.")
        assert "double does not load: Internal: ModuleNotFoundError" in text
        assert "1/model.py:1 in <module>" in text
        file.write_text(SOURCE)
        session.read("loaded in")
        assert "infer double" in session.read("IN=[1]")
    finally:
        session.close()


def test_a_wrong_configuration_is_shown_with_its_place_and_what_was_meant(session: DevSession, model: Path) -> None:
    session.read("Ctrl-C ends.")
    file = model / "config.pbtxt"
    file.write_text(f"max_batch_sise: 4\n{CONFIG}")
    shown = session.read("still serves")
    assert "double/config.pbtxt:1:1: " in shown
    assert 'no field named "max_batch_sise"' in shown
    assert "hint: did you mean 'max_batch_size'?" in shown
    file.write_text(CONFIG)
    session.read("loaded in")


def test_without_a_terminal_the_log_has_exceptions_of_the_model(model: Path) -> None:
    file = model / "1" / "model.py"
    session = DevSession(model, stdin=subprocess.DEVNULL)
    try:
        match = re.search(r"http localhost:(\d+)", session.read("breakpoint() does nothing"))
        assert match is not None
        session.infer(match[1], 9)
        session.read("cannot reshape")
        session.read("model.py(13): execute")
        file.write_text("import nothing_of_this_name\n")
        session.read("double does not load: Internal: ModuleNotFoundError")
        session.read("model.py(1): <module>")
    finally:
        session.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model-repository=x"], "--model-repository has no meaning for dev"),
        (["--load-model", "x"], "--load-model has no meaning for dev"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--http-port=80", "--grpc-port=80"], "at the same address"),
    ],
)
def test_flags_that_dev_cannot_have_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        dev_options(Target(tmp_path, "double"), words, {}, "")


def test_dev_listens_on_this_machine_and_has_no_limits_unless_flags_say_so(tmp_path: Path) -> None:
    options, _ = dev_options(Target(tmp_path, "double"), ["--grpc-address=0.0.0.0"], {}, "/dev/pts/9")
    assert (options.http_listener.address, options.grpc_listener.address) == ("127.0.0.1", "0.0.0.0")
    assert (options.repository.load_models, options.repository.exit_on_error) == (("double",), False)
    assert (options.execution_timeout_s, options.repository.load_timeout_s, options.debugging) == (0, 0, True)
    assert options.repository.backend_config == ("python,terminal=/dev/pts/9",)


def test_a_folder_that_is_no_model_is_named_with_the_models_in_it(model: Path) -> None:
    command = [sys.executable, "-m", "kernel", "dev", str(model.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: '{model.parent}' is not the folder of a model: there is no config.pbtxt and no version; it has "
        f"models: give one of them, such as {model}\n"
    )


@pytest.mark.parametrize(
    ("name", "level", "text", "seen"),
    [
        ("model", logging.INFO, "double: hello", True),
        ("model", logging.ERROR, "double: failed\n\nAt:\n  model.py(1): x", False),
        ("kernel.repository.loading", logging.ERROR, "failed to load", False),
        ("kernel.repository.loading", logging.WARNING, "rate_limiter has no effect", True),
        ("kernel.app", logging.INFO, "Started", False),
        ("protocols.http.server", logging.ERROR, "a bug", True),
    ],
)
def test_the_log_has_what_authors_need(name: str, level: int, text: str, seen: bool) -> None:
    assert for_author(logging.LogRecord(name, level, "", 0, text, (), None), shown_by_worker=True) is seen


def folder(name: str, *children: Entry) -> Entry:
    return Entry(name, is_folder=True, children=children)


def test_files_of_editors_caches_and_tests_are_not_the_models() -> None:
    names = ("model.py", "model.py~", ".model.py.swp", "4913", "#model.py#", "x.pyc", "test_model.py", "test.txt")
    entry = folder("double", Entry("config.pbtxt", modified_ns=1), folder("1", *(Entry(name) for name in names)))
    assert files_of([entry, folder(".git", Entry("HEAD"))]) == {
        "double/config.pbtxt": 1,
        "double/1/model.py": 0,
        "double/1/test.txt": 0,
    }


def test_a_change_is_seen_once_when_it_is_quiet() -> None:
    watch = ChangeWatch({"a": 1})
    assert watch.look({"a": 1}, 0) == []
    assert watch.look({"a": 2}, 10) == []
    assert watch.look({"a": 2}, 9 + QUIET_NS) == []
    assert watch.look({"a": 2}, 10 + QUIET_NS) == ["a"]
    assert watch.look({"a": 2}, 10 + 2 * QUIET_NS) == []


def test_a_file_that_changes_again_begins_the_wait_again() -> None:
    watch = ChangeWatch({"a": 1})
    watch.look({"a": 2}, 0)
    assert watch.look({"a": 3}, QUIET_NS) == []
    assert watch.look({"a": 3}, 2 * QUIET_NS) == ["a"]


def test_new_and_removed_files_are_named() -> None:
    watch = ChangeWatch({"a": 1, "b": 1})
    watch.look({"b": 1, "c": 1}, 0)
    assert watch.look({"b": 1, "c": 1}, QUIET_NS) == ["a", "c"]


def test_a_change_that_is_taken_back_is_none() -> None:
    watch = ChangeWatch({"a": 1})
    watch.look({"a": 2}, 0)
    watch.look({"a": 1}, 5)
    assert watch.look({"a": 1}, 5 + QUIET_NS) == []
