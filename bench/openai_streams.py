"""Streams of OpenAI's API: tokens per second, CPU of the kernel for each token, time to the first token.

    python -m bench.openai_streams                   1, 16 and 64 streams
    python -m bench.openai_streams --idle 2000       memory of streams that wait

The model sends its tokens at once, each as a response of its own; the client only counts them. Run it on a quiet
machine. The CPU of the kernel is without busy polling.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import tempfile
import time
from pathlib import Path

from bench.server import ServerProcess, rss_bytes

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
        request = b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        self._selector = selectors.DefaultSelector()
        self.tokens = 0
        self.first_s = 0.0
        self._begin_s = time.perf_counter()
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
                if _WORD in tail and not self.first_s:
                    self.first_s = time.perf_counter() - self._begin_s
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
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(server: ServerProcess, streams: int, tokens: int) -> str:
    """Return a line of the table."""
    cpu_before, begin = cpu_s(server.pid), time.perf_counter()
    found = CountedStreams(server.openai_port, streams, "go", tokens)
    found.read()
    wall, cpu = time.perf_counter() - begin, cpu_s(server.pid) - cpu_before
    assert found.tokens == streams * tokens, f"{found.tokens} tokens came of {streams * tokens}"
    return (
        f"{streams:>8} {tokens:>8} {found.tokens / wall:>12,.0f} {cpu / found.tokens * 1e6:>10.2f} "
        f"{found.first_s * 1e3:>10.1f}"
    )


def measure_idle(server: ServerProcess, count: int) -> str:
    """Return how much memory of the kernel a stream takes that waits for its model."""
    held = [CountedStreams(server.openai_port, 200, "wait", 1)]  # what the first ones take only once
    held[0].read(first_only=True)
    before = rss_bytes(server.pid)
    for _ in range(0, count, 50):
        held.append(CountedStreams(server.openai_port, 50, "wait", 1))
        held[-1].read(first_only=True)
    return f"{(rss_bytes(server.pid) - before) / count / 1024:.1f} KiB for each of {count} streams"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000, help="of each stream")
    parser.add_argument("--idle", type=int, default=0, help="how many streams wait")
    parser.add_argument("--instances", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "words" / "1").mkdir(parents=True)
        (Path(folder) / "words" / "config.pbtxt").write_text(CONFIG % options.instances)
        (Path(folder) / "words" / "1" / "model.py").write_text(MODEL)
        with ServerProcess(Path(folder), "--openai-port=0", "--busy-poll-us=0") as server:
            if options.idle:
                print(measure_idle(server, options.idle))
                return
            print(f"{'streams':>8} {'tokens':>8} {'tokens/s':>12} {'us/token':>10} {'first ms':>10}")
            measure(server, 1, 1000)
            for streams in (1, 16, 64):
                print(measure(server, streams, options.tokens))


if __name__ == "__main__":
    main()
