"""OpenAI's API in a whole server when a worker is killed, a client reads slowly, or many streams are idle."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from bench.server import ServerProcess, rss_bytes, wait_for
from kernel.options import CHAT_DEMO_REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "openai_request" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters { key: "naiad.concurrency" value { string_value: "1024" } }
"""

#: Sends `max_tokens` words at once, and then waits, without an end, if the prompt says so.
MODEL = """
import asyncio, json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            asked = json.loads(pb_utils.get_input_tensor_by_name(request, "openai_request").as_numpy()[0])
            word = pb_utils.Tensor("text_output", np.array([b"word " * 20], np.object_))
            for number in range(asked["max_tokens"]):
                sender.send(pb_utils.InferenceResponse([word]))
                await asyncio.sleep(0)
            while asked["prompt"] == "wait" and not request.is_cancelled():
                await asyncio.sleep(0.01)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    (tmp_path / "words" / "1").mkdir(parents=True)
    (tmp_path / "words" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "words" / "1" / "model.py").write_text(MODEL)
    with ServerProcess(tmp_path, "--openai-port=0") as running:
        yield running


def asked(prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": "words", "prompt": prompt, "max_tokens": tokens, "stream": True}


def test_a_killed_worker_ends_each_of_its_streams_with_one_error(server: ServerProcess) -> None:
    async def all_streams() -> list[bytes]:
        begun = 0
        url = f"http://127.0.0.1:{server.openai_port}"
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, connector=connector) as session:

            async def read() -> bytes:
                nonlocal begun
                async with session.post("/v1/completions", json=asked("wait", 2)) as response:
                    first = await response.content.readuntil(b"\n\n")
                    begun += 1
                    if begun == 16:
                        [worker] = server.workers("words")
                        os.kill(worker, signal.SIGKILL)
                    return first + await response.read()

            return list(await asyncio.gather(*(read() for _ in range(16))))

    for body in asyncio.run(all_streams()):
        *_, last = body.decode().strip().split("\n\n")
        assert body.count(b'"error"') == 1
        assert json.loads(last.removeprefix("data: "))["error"]["type"] in ("server_error", "service_unavailable")
        assert b"[DONE]" not in body


def test_a_slow_reader_takes_little_memory_and_others_are_served_meanwhile(server: ServerProcess) -> None:
    before = rss_bytes(server.pid)
    body = json.dumps(asked("fast", 200_000)).encode()
    with socket.create_connection(("127.0.0.1", server.openai_port)) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert slow.recv(12) == b"HTTP/1.1 200"

        async def others() -> bytes:
            url = f"http://127.0.0.1:{server.openai_port}"
            async with (
                aiohttp.ClientSession(url) as session,
                session.post("/v1/completions", json=asked("fast", 500)) as response,
            ):
                return await response.read()

        for _ in range(3):
            assert asyncio.run(others()).count(b'"text":"word') == 500
        assert rss_bytes(server.pid) - before < 16 << 20  # the whole stream has 60 MB
    wait_for(lambda: not server.get("/v2/models/words/stats")[1].count('"in_flight":1'))


def test_streams_that_wait_take_little_memory(server: ServerProcess) -> None:
    count = 500

    async def hold() -> int:
        url = f"http://127.0.0.1:{server.openai_port}"
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:

            async def begin() -> aiohttp.ClientResponse:
                response = await session.post("/v1/completions", json=asked("wait", 1))
                await response.content.readuntil(b"\n\n")
                return response

            async def begin_all(number: int) -> list[aiohttp.ClientResponse]:
                return [response for _ in range(number // 50) for response in await some(50)]

            async def some(number: int) -> list[aiohttp.ClientResponse]:
                return list(await asyncio.gather(*(begin() for _ in range(number))))

            responses = await begin_all(100)  # what the first ones take only once
            before = rss_bytes(server.pid)
            responses += await begin_all(count)
            taken = rss_bytes(server.pid) - before
            for response in responses:
                response.close()
            return taken

    taken = asyncio.run(hold())
    assert taken / count < 48 << 10


def test_of_several_clients_that_load_a_model_one_does(tmp_path: Path) -> None:
    """Whether the others come before it is loaded or after, they are refused."""
    shutil.copytree(CHAT_DEMO_REPOSITORY / "chat", tmp_path / "chat")
    with ServerProcess(tmp_path, "--openai-port=0", "--model-control-mode=explicit") as server:

        def post(name: str, action: str) -> tuple[int, str]:
            url = f"http://127.0.0.1:{server.openai_port}/v1/models/{name}/{action}"
            try:
                with urllib.request.urlopen(urllib.request.Request(url, method="POST")) as response:
                    return response.status, ""
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, json.load(error)["detail"]

        for action, refusal in (
            ("load", r"Model 'chat' is already (being )?loaded"),
            ("unload", "Unknown model: chat"),
        ):
            with ThreadPoolExecutor(5) as clients:
                found = sorted(clients.map(post, ["chat"] * 5, [action] * 5))
            assert [status for status, _ in found] == [200, 400, 400, 400, 400]
            assert all(re.fullmatch(refusal, text) for _, text in found[1:]), found
        status, text = post("none", "load")
        assert status == 500
        assert "failed to poll from model repository" in text
