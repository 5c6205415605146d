"""`naiad chat` at a terminal: a conversation as a person types it, and the response that Ctrl-C ends."""

from __future__ import annotations

import codecs
import functools
import json
import os
import re
import select
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerProcess, wait_for
from kernel.options import CHAT_DEMO_REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator

#: How long a test waits for something on the terminal.
PATIENCE_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    shutil.copytree(CHAT_DEMO_REPOSITORY / "chat", repository / "chat")
    with ServerProcess(repository, "--openai-port=0") as running:
        yield running


class Typist:
    """A person at a terminal that `naiad chat` runs in."""

    def __init__(self, *arguments: str) -> None:
        self._keys, terminal = os.openpty()
        environment = {**os.environ, "TERM": "dumb", "OPENAI_API_KEY": "sk-1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kernel", "chat", *arguments],
            preexec_fn=functools.partial(os.login_tty, terminal),
            env=environment,
        )
        os.close(terminal)
        #: What was printed since the last call of `sees`.
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def __enter__(self) -> Typist:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keys)

    def types(self, keys: str) -> None:
        os.write(self._keys, keys.encode())

    def presses_ctrl_c(self, pattern: str) -> None:
        """Press Ctrl-C, again every second, until something on the terminal fits `pattern`.

        Python's readline does not see a signal that comes after its prompt and before it waits for keys.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            self.types("\x03")
            try:
                self.sees(pattern, patience_s=1)
            except AssertionError:
                if time.monotonic() > deadline_s:
                    raise
            else:
                return

    def sees(self, pattern: str, patience_s: float = PATIENCE_S) -> str:
        """Wait until something on the terminal fits `pattern`, and return what came up to its end."""
        deadline_s = time.monotonic() + patience_s
        while not (found := re.search(pattern, self._text)):
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{pattern!r} is not in {self._text!r}"
            if select.select([self._keys], [], [], left_s)[0]:
                try:
                    self._text += self._decoder.decode(os.read(self._keys, 4096))
                except OSError:  # the program has ended
                    assert re.search(pattern, self._text), f"{pattern!r} is not in {self._text!r}"
        shown, self._text = self._text[: found.end()], self._text[found.end() :]
        return shown

    def ends(self) -> int:
        """Wait until the program has ended, and return its exit code."""
        return self.process.wait(PATIENCE_S)


def url_of(server: ServerProcess) -> str:
    return f"--url=127.0.0.1:{server.openai_port}"


def test_a_conversation_is_held_until_its_end_is_typed(server: ServerProcess) -> None:
    with Typist(url_of(server)) as typist:
        typist.sees("Talking to chat.*\n> ")
        typist.types("hello there\n")
        assert "You said: hello there That is all I know." in typist.sees(r"\d+ tokens, \d+ a second, .* in all")
        typist.sees("> ")
        typist.types("two \\\nlines\n")
        assert "You said: two lines That is all" in typist.sees("in all")
        typist.sees("> ")
        typist.presses_ctrl_c("Ctrl-D or /exit ends")
        typist.sees("> ")
        typist.types("\x04")
        assert typist.ends() == 0


def test_ctrl_c_ends_the_response_and_the_work_of_the_model_and_not_the_conversation(server: ServerProcess) -> None:
    with Typist("chat", url_of(server)) as typist:
        typist.sees("> ")
        typist.types("word " * 700 + "\n")  # twenty seconds
        typist.sees("You said: word word")
        typist.types("\x03")
        typist.sees("ended by you")
        wait_for(lambda: "naiad_openai_cancelled_requests_total" in page(server) and cancelled(server) == 1)
        typist.sees("> ")
        typist.types("again\n")
        typist.sees("You said: again That is all I know")
        typist.types("/exit\n")
        assert typist.ends() == 0


def page(server: ServerProcess) -> str:
    return server.get("/metrics", server.metrics_port)[1]


def cancelled(server: ServerProcess) -> int:
    found = re.search(r"^naiad_openai_cancelled_requests_total\{.*\} (\d+)$", page(server), re.MULTILINE)
    assert found is not None
    return int(found[1])


class _Recording(BaseHTTPRequestHandler):
    """Another server with OpenAI's API, which keeps what it is asked."""

    asked: list[tuple[str | None, dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._respond(b'{"data": [{"id": "one"}, {"id": "two"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.headers["Authorization"], body))
        text = body["messages"][-1]["content"]
        if text == "fail":
            self._respond(rb'{"error": {"message": "no \u001b[31m such thing"}}', 400)
            return
        chunks: list[Any] = [
            {"choices": [{"index": 0, "delta": {"content": f"\x1b[31m{text}!"}}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
        ]
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self._respond((": comment\n\n" + "".join(events) + "data: [DONE]\n\n").encode())

    def _respond(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


@pytest.fixture
def other() -> Iterator[str]:
    _Recording.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Recording) as running:
        threading.Thread(target=running.serve_forever).start()
        yield f"http://127.0.0.1:{running.server_port}/v1"
        running.shutdown()


def test_any_server_gets_the_whole_conversation_which_can_begin_anew(other: str) -> None:
    with Typist("one", f"--url={other}", "--system=Be brief.", "--max-tokens=7", "--temperature=0") as typist:
        for text in ("first", "fail", "second", "/reset", "/system", "third", "/what"):
            typist.sees("> ")
            typist.types(f"{text}\n")
            if text == "first":
                typist.sees(r"\\u001b\[31mfirst!.*\n.*cut off at the limit of tokens")
            elif text == "fail":
                typist.sees(r"error: the server returned 400: no \\u001b\[31m such thing")
            elif text == "/what":
                typist.sees("there is no /what")
            elif not text.startswith("/"):
                typist.sees(f"{text}!")
        typist.sees("> ")
        typist.types("/exit\n")
        assert typist.ends() == 0
    conversations = [[each["content"] for each in body["messages"]] for _, body in _Recording.asked]
    assert conversations == [
        ["Be brief.", "first"],
        ["Be brief.", "first", "\x1b[31mfirst!", "fail"],
        ["Be brief.", "first", "\x1b[31mfirst!", "second"],
        ["third"],
    ]
    assert {key for key, _ in _Recording.asked} == {"Bearer sk-1"}
    [body] = [body for _, body in _Recording.asked[:1]]
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("one", 7, 0, True)


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kernel", "chat", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_without_a_terminal_standard_input_is_one_message(server: ServerProcess) -> None:
    done = run(url_of(server), text="hello\nthere\n")
    assert (done.stdout, done.stderr, done.returncode) == ("You said: hello there That is all I know.\n", "", 0)


def test_errors_say_what_to_do(other: str) -> None:
    done = run(f"--url={other}", text="hi")
    assert (done.returncode, done.stderr) == (1, "error: name the model of the server to talk to: it has one, two\n")
    done = run("chat", "--url=127.0.0.1:1", text="hi")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no server responds at http://127.0.0.1:1/v1: Connection refused. Start one")


def test_a_port_of_another_protocol_is_named_as_such(server: ServerProcess) -> None:
    done = run("chat", f"--url=http://{server.url}", text="hi")
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
