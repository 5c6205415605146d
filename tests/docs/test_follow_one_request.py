"""docs/follow-one-request.md against a real request: the names on the page are called, in the order of the page."""

from __future__ import annotations

import re
import socket
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.transport import wire
from kernel.embedding import EmbeddedServer
from shm.lease import RegionNumber
from shm.tensor import Span, Tensor
from tests.docs.documents import ROOT, code_blocks, document

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

PAGE = document("docs/follow-one-request.md")
[MODEL] = [block.text for block in code_blocks(PAGE, "python")]
[MESSAGE] = [block.text for block in code_blocks(PAGE, "http")]
VALUES = np.arange(65536, dtype="<f4").reshape(1, 65536)

CONFIG = """
backend: "python"
max_batch_size: 8
dynamic_batching { }
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 65536 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 65536 ] } ]
"""

#: Makes the model of the page write down what its worker calls, up to the execution of the last request.
RECORDER = """
import sys
from pathlib import Path

class TritonPythonModel(TritonPythonModel):
    def initialize(self, args):
        self.calls, self.executions = [], 0
        sys.setprofile(self.note)

    def note(self, frame, event, argument):
        if event == "call":
            self.calls.append(f"{frame.f_code.co_filename} {frame.f_code.co_qualname}")

    def execute(self, requests):
        self.executions += 1
        if self.executions == 3:
            sys.setprofile(None)
            Path(__file__).with_name("calls").write_text("\\n".join(self.calls))
        return super().execute(requests)
"""


class Recorder:
    """The calls of our functions in threads that are started while it is installed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._awaited = ""
        self._called = threading.Event()

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called = f"{frame.f_code.co_filename} {frame.f_code.co_qualname}"
            self.calls.append(called)
            if self._awaited and called.endswith(self._awaited):
                self._called.set()

    def expect(self, name: str) -> None:
        """Let `wait` return when the function `name` is called from now on."""
        self._called.clear()
        self._awaited = f" {name}"

    def wait(self) -> None:
        assert self._called.wait(60), f"{self._awaited.strip()} was not called"


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder, before = Recorder(), threading.getprofile()
    threading.setprofile(recorder.note)
    yield recorder
    threading.setprofile(before)


def sections() -> dict[str, list[str]]:
    """Return heading → the functions that the section links to, as the recorders note them."""
    found = {}
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        links = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", part)
        names = [f"{ROOT / path} {name + '.__init__' if name in CLASSES else name}" for name, path in links]
        if names:
            found[part.partition("\n")[0]] = names
    return found


#: The page says where objects of these classes are made.
CLASSES = ("BodyReceiver",)
SECTIONS = sections()


def test_each_name_of_the_page_is_called_in_the_order_of_the_page(folder: Path, recorder: Recorder) -> None:
    version = folder / "models" / "double" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL + RECORDER)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    with EmbeddedServer(folder / "models", http_port=0) as server:
        for _ in range(3):
            before = len(recorder.calls)
            doubled = infer(server, recorder)
    assert doubled.tobytes() == (VALUES * 2).tobytes()
    kernel = recorder.calls[before:]
    worker = (version / "calls").read_text().splitlines()
    assert len(SECTIONS) == 6
    for heading, names in SECTIONS.items():
        assert missing(names, worker if "In the worker" in heading else kernel) == [], heading


def missing(names: list[str], calls: list[str]) -> list[str]:
    """Return the first of `names` that does not follow those before it in `calls`, and all after it."""
    position = 0
    for number, name in enumerate(names):
        try:
            position = calls.index(name, position) + 1
        except ValueError:
            return names[number:]
    return []


def infer(server: EmbeddedServer, recorder: Recorder) -> np.ndarray:
    """Send the message of the page, the body after its head was taken, and return the output."""
    head, separator, body = MESSAGE.partition("\n\n")
    body = body.removesuffix("\n")
    recorder.expect("incoming_body")
    with socket.create_connection(("127.0.0.1", server.ports["http"])) as client, client.makefile("rb") as received:
        client.sendall((head + separator).replace("\n", "\r\n").encode())
        recorder.wait()
        recorder.expect("WorkerMemory._send_freed")
        client.sendall(body.encode() + VALUES.tobytes())
        assert received.readline() == b"HTTP/1.1 200 OK\r\n"
        lines = iter(received.readline, b"\r\n")
        fields = dict(line.decode().lower().strip().split(": ", 1) for line in lines)
        header_length = int(fields["inference-header-content-length"])
        received.read(header_length)
        output = received.read(int(fields["content-length"]) - header_length)
        recorder.wait()
    return np.frombuffer(output, "<f4")


def test_the_lengths_in_the_message_of_the_page_are_right() -> None:
    head, _, body = MESSAGE.partition("\n\n")
    header_length = len(body.removesuffix("\n"))
    assert f"Inference-Header-Content-Length: {header_length}\n" in head
    assert head.endswith(f"Content-Length: {header_length + VALUES.nbytes}")


def test_the_messages_to_and_from_the_worker_are_as_long_as_the_page_says() -> None:
    request = Tensor("IN", "FP32", [1, 65536], None, Span(RegionNumber(3), 1_048_640, VALUES.nbytes))
    response = Tensor("OUT", "FP32", [1, 65536], None, Span(RegionNumber(0), 1_048_640, VALUES.nbytes))
    execute = wire.Execute(17, [wire.RequestMessage(23, [request])], 200_000)
    times_ns = [10**15] * 4
    executed = wire.Executed(17, [wire.ResponseMessage([response])], *times_ns)
    executed.copies, executed.copied_byte_size = 1, VALUES.nbytes
    lengths = [len(wire.encoder.encode(message)) for message in (execute, executed)]
    assert [round(length, -1) for length in lengths] == [
        int(found) for found in re.findall(r"about (\d\d) bytes", PAGE)
    ]
