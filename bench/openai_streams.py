"""Streams of OpenAI's API: tokens per second, CPU of the kernel for each token, time to the first token, memory.

    python -m bench.openai_streams                   1, 16 and 64 streams, and the time to the first token
    python -m bench.openai_streams --beside          the same of FastAPI with sse-starlette, in turns, and the ratio
    python -m bench.openai_streams --client          the rate that OpenAI's own client reaches
    python -m bench.openai_streams --idle 2000       memory of streams that wait

The model sends its tokens at once, each as a response of its own; the client only counts them. Before, the text of one
stream is compared. Run it on a quiet machine. The CPU of the kernel is without busy polling. The exit code is 1 if a
figure misses its limit, which stands behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import selectors
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.machine import stat_fields
from bench.peers.peer import NotInstalled, PeerServer, Service, Setup
from bench.peers.serving import serving
from bench.server import ServerProcess, rss_bytes, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.peers.peer import ServedPeer

#: Streams → the fewest tokens per second.
LEAST_TOKENS_S = {1: 45_000, 16: 60_000, 64: 60_000}

#: The most CPU of the kernel for a token, if tokens wait, and the most milliseconds to the first token: the model sends
#: it at once.
MOST_CPU_US, MOST_FIRST_MS = 8.0, 2.0

#: The fewest times the rate of FastAPI with sse-starlette.
LEAST_RATIO = 4.0

#: The most memory of the kernel for a stream that waits.
MOST_IDLE_KIB = 24.0

CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "openai_request" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters { key: "naiad.concurrency" value { string_value: "1024" } }
instance_group [ { count: %d kind: KIND_CPU } ]
"""

#: Sends `max_tokens` words, and then waits for its client to leave if the prompt says so.
MODEL = """
import asyncio, json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            asked = json.loads(pb_utils.get_input_tensor_by_name(request, "openai_request").as_numpy()[0])
            word = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([b"word "], np.object_))])
            for number in range(asked["max_tokens"]):
                sender.send(word)
                if number % 32 == 31:
                    await asyncio.sleep(0)
            while asked["prompt"] == "wait" and not request.is_cancelled():
                await asyncio.sleep(0.05)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

_WORD = b'"text":"word'
_DONE = b"[DONE]"


class CountedStreams:
    """Connections on which streams were asked for."""

    def __init__(self, port: int, count: int, prompt: str, tokens: int) -> None:
        body = json.dumps({"model": "words", "prompt": prompt, "max_tokens": tokens, "stream": True}).encode()
        request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        self._selector = selectors.DefaultSelector()
        self.tokens = 0
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(request)
            self._selector.register(connection, selectors.EVENT_READ, bytearray())

    def read(self, *, first_only: bool = False) -> None:
        """Count tokens until all streams have ended, or each has its first one. Raises `ConnectionError`."""
        remaining = len(self._selector.get_map())
        while remaining:
            for key, _ in self._selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                received = connection.recv(1 << 18)
                if not received:
                    raise ConnectionError("the server has closed a stream")
                tail: bytearray = key.data
                tail += received
                # A word may be cut where one piece ends: what is behind the last whole one is kept.
                last = tail.rfind(_WORD)
                ended = _WORD in tail if first_only else _DONE in tail
                self.tokens += tail.count(_WORD)
                if last >= 0:
                    del tail[: last + len(_WORD)]
                if ended:
                    remaining -= 1
                    if not first_only:
                        self._selector.unregister(connection)
                        connection.close()


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process."""
    return sum(map(int, stat_fields(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


class Limits:
    """What a figure should be, and whether all are."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def at_least(self, name: str, figure: float, limit: float) -> str:
        return self._judged(name, figure >= limit, f"at least {limit:,.0f}")

    def at_most(self, name: str, figure: float, limit: float) -> str:
        return self._judged(name, figure <= limit, f"at most {limit:,.0f}")

    def _judged(self, name: str, met: bool, limit: str) -> str:
        if not met:
            self.missed.append(name)
        return f"({limit}{'' if met else ', MISSED'})"


def check_answer(port: int, tokens: int = 500) -> None:
    """Read one stream as a client does; raises `AssertionError` for a wrong text, end or number of ends."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        body = json.dumps({"model": "words", "prompt": "go", "max_tokens": tokens, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        events = [each for each in response.read().decode().replace("\r\n", "\n").split("\n\n") if each]
    assert response.status == 200, f"status {response.status}"
    *chunks, done = [event.removeprefix("data: ") for event in events]
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    text = "".join(choice["text"] for choice in choices)
    assert text == "word " * tokens, f"the text is wrong: {text[:40]!r}, {len(text)} characters"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] in (["stop"], ["length"])
    assert done == "[DONE]", f"the stream ends with {done[:40]!r}"


def rate_of(port: int, streams: int, tokens: int) -> float:
    """Return tokens per second. Raises `AssertionError` if not all have come."""
    begin = time.perf_counter()
    found = CountedStreams(port, streams, "go", tokens)
    found.read()
    wall = time.perf_counter() - begin
    assert found.tokens == streams * tokens, f"{found.tokens} tokens came of {streams * tokens}"
    return found.tokens / wall


def measure(server: ServerProcess, streams: int, tokens: int, limits: Limits) -> str:
    """Return a line of the table."""
    cpu_before = cpu_s(server.pid)
    rate = rate_of(server.openai_port, streams, tokens)
    cpu_us = (cpu_s(server.pid) - cpu_before) / (streams * tokens) * 1e6
    least = limits.at_least(f"tokens/s with {streams} streams", rate, LEAST_TOKENS_S[streams])
    most = limits.at_most(f"CPU with {streams} streams", cpu_us, MOST_CPU_US)
    return f"{streams:>8} {tokens:>8} {rate:>12,.0f} {least:<28} {cpu_us:>10.2f} {most}"


def measure_first(port: int, limits: Limits, count: int = 300) -> str:
    """Return how long the first token of a stream takes, one after the other. The model sends it at once."""
    body = json.dumps({"model": "words", "prompt": "go", "max_tokens": 1, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    waits = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(count):
            begin = time.perf_counter()
            connection.sendall(request)
            received, wait_s = b"", 0.0
            while _DONE not in received or not received.endswith(b"0\r\n\r\n"):
                part = connection.recv(1 << 16)
                assert part, "the server has closed the connection"
                received += part
                if _WORD in received and not wait_s:
                    wait_s = time.perf_counter() - begin
            waits.append(wait_s * 1e3)
    median, tail = statistics.median(waits), statistics.quantiles(waits, n=100)[98]
    judged = limits.at_most("first token", median, MOST_FIRST_MS)
    return f"first token after {median:.2f} ms {judged}, p99 {tail:.2f} ms, of {count} streams one after the other"


def measure_idle(server: ServerProcess, count: int, limits: Limits) -> str:
    """Return how much memory of the kernel a stream takes that waits for its model."""
    held = [CountedStreams(server.openai_port, 200, "wait", 1)]  # what the first ones take only once
    held[0].read(first_only=True)
    before = rss_bytes(server.pid)
    for _ in range(0, count, 50):
        held.append(CountedStreams(server.openai_port, 50, "wait", 1))
        held[-1].read(first_only=True)
    kib = (rss_bytes(server.pid) - before) / count / 1024
    return f"{kib:.1f} KiB for each of {count} streams {limits.at_most('memory of idle streams', kib, MOST_IDLE_KIB)}"


# ---- another server, and OpenAI's client -----------------------------------------------------


#: The same words over FastAPI and sse-starlette: the model is within the server, and costs nothing.
FASTAPI = """
import json, time
from fastapi import FastAPI
from pydantic import BaseModel
from sse_starlette import EventSourceResponse

app = FastAPI()

class Asked(BaseModel):
    model: str
    prompt: str
    max_tokens: int
    stream: bool

def chunk(text, finish_reason=None):
    return json.dumps({
        "id": "cmpl-1", "object": "text_completion", "created": int(time.time()), "model": "words",
        "system_fingerprint": None,
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}],
    }, separators=(",", ":"))

@app.post("/v1/completions")
async def completions(asked: Asked):
    async def events():
        for _ in range(asked.max_tokens):
            yield {"data": chunk("word ")}
        yield {"data": chunk("", "stop")}
        yield {"data": "[DONE]"}

    return EventSourceResponse(events(), sep="\\n")
"""


def _service(setup: Setup) -> Service:
    command = [
        "uvicorn", "service:app", "--host=127.0.0.1", f"--port={setup.http_port}", "--workers=1", "--loop=uvloop",
        "--http=httptools", "--no-access-log", "--log-level=warning",
    ]  # fmt: skip
    return Service({"service.py": FASTAPI}, command)


OTHER = PeerServer(
    name="sse-starlette",
    title="FastAPI, sse-starlette",
    settings="one worker, uvloop, httptools, no access log",
    source="https://github.com/sysid/sse-starlette",
    endpoints={},
    requirements=("sse-starlette", "fastapi", "uvicorn[standard]"),
    service=_service,
)


@contextlib.contextmanager
def other_server() -> Iterator[ServedPeer]:
    """FastAPI with sse-starlette, while the block runs. Raises `NotInstalled`."""
    with serving(OTHER, 1) as served:

        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", served.http_port), 1):
                return True
            return False

        wait_for(listens)
        check_answer(served.http_port)
        yield served


#: How often both servers are measured, in turns.
_ROUNDS = 5


def compare(server: ServerProcess, tokens: int, limits: Limits) -> None:
    """Print the rates of both servers, and their ratio: medians of rounds that alternate."""
    with other_server() as other:
        print(f"{'streams':>8} {'ours':>12} {OTHER.title:>24} {'ratio':>8}")
        for streams in LEAST_TOKENS_S:
            pairs = []
            for _ in range(_ROUNDS):
                ours = rate_of(server.openai_port, streams, tokens // streams)
                pairs.append((ours, rate_of(other.http_port, streams, tokens // streams)))
            ours, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
            ratio = statistics.median(one / two for one, two in pairs)
            judged = limits.at_least(f"ratio with {streams} streams", ratio, LEAST_RATIO)
            print(f"{streams:>8} {ours:>12,.0f} {theirs:>24,.0f} {ratio:>8.1f} {judged}")


def measure_client(port: int, tokens: int) -> str:
    """Return the rate of OpenAI's client with one stream: most of its time is its own."""
    import openai

    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client:
        begin = time.perf_counter()
        stream = client.completions.create(model="words", prompt="go", max_tokens=tokens, stream=True)
        count = sum(chunk.choices[0].text == "word " for chunk in stream)
        wall = time.perf_counter() - begin
    assert count == tokens, f"{count} tokens came of {tokens}"
    return f"openai {openai.__version__} reads {count / wall:,.0f} tokens/s of one stream"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000, help="of each stream; of all together with --beside")
    parser.add_argument("--beside", action="store_true", help="compare with FastAPI and sse-starlette")
    parser.add_argument("--client", action="store_true", help="measure OpenAI's client")
    parser.add_argument("--idle", type=int, default=0, help="how many streams wait")
    parser.add_argument("--instances", type=int, default=3)
    options = parser.parse_args()
    limits = Limits()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "words" / "1").mkdir(parents=True)
        (Path(folder) / "words" / "config.pbtxt").write_text(CONFIG % options.instances)
        (Path(folder) / "words" / "1" / "model.py").write_text(MODEL)
        with ServerProcess(Path(folder), "--openai-port=0", "--busy-poll-us=0") as server:
            check_answer(server.openai_port)
            if options.idle:
                print(measure_idle(server, options.idle, limits))
            elif options.client:
                print(measure_client(server.openai_port, options.tokens))
            elif options.beside:
                try:
                    compare(server, options.tokens, limits)
                except NotInstalled as error:
                    sys.exit(f"{OTHER.title} cannot be measured: {error}")
            else:
                print(f"{'streams':>8} {'tokens':>8} {'tokens/s':>12} {'':<28} {'us/token':>10}")
                rate_of(server.openai_port, 1, 1000)
                for streams in LEAST_TOKENS_S:
                    print(measure(server, streams, options.tokens, limits))
                print(measure_first(server.openai_port, limits))
    if limits.missed:
        sys.exit(f"missed: {', '.join(limits.missed)}")


if __name__ == "__main__":
    main()
