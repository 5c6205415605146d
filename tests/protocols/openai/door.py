"""An OpenAI server in front of a kernel whose models are scripts in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
from google.protobuf import text_format

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import model_spec
from kernel.options import AdminOptions, HttpOptions, OpenAiOptions
from kernel.serving.response import Response
from protocols.openai.server import OpenAiServer
from shm.tensor import Tensor
from tests.protocols.front_door_lab import FrontDoorLab, listening

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kernel.errors import ServingError
    from kernel.serving.request import Request
    from kernel.settings import TraceSettings
    from tests.protocols.front_door_lab import InProcessInstance


CHAT = "/v1/chat/completions"

NOW_S = 1_700_000_000

ASKED: dict[str, Any] = {"model": "talk", "messages": [{"role": "user", "content": "hi"}]}

#: The inputs that NVIDIA's backend for vLLM adds to a configuration.
VLLM = """
input { name: "text_input" data_type: TYPE_STRING dims: [1] optional: true }
input { name: "image" data_type: TYPE_STRING dims: [-1] optional: true }
input { name: "stream" data_type: TYPE_BOOL dims: [1] optional: true }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: [1] optional: true }
input { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [1] optional: true }
input { name: "return_finish_reason" data_type: TYPE_BOOL dims: [1] optional: true }
input { name: "return_num_input_tokens" data_type: TYPE_BOOL dims: [1] optional: true }
input { name: "return_num_output_tokens" data_type: TYPE_BOOL dims: [1] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
"""


def config(name: str, outputs: Sequence[str] = ("text_output",), more: str = "") -> ModelConfig:
    """Return the configuration of a model for this front door."""
    text = f'name: "{name}" backend: "fake" model_transaction_policy {{ decoupled: true }} {more}\n'
    text += 'input { name: "openai_request" data_type: TYPE_STRING dims: [ 1 ] }\n'
    for output in outputs:
        kind = "TYPE_INT32" if output.startswith("num") else "TYPE_STRING"
        text += f'output {{ name: "{output}" data_type: {kind} dims: [ 1 ] }}\n'
    return text_format.Parse(text, ModelConfig())


ALL_OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")


def text_tensor(name: str, text: str | bytes) -> Tensor:
    octets = text if isinstance(text, bytes) else text.encode()
    return Tensor(name, "BYTES", [1], len(octets).to_bytes(4, "little") + octets)


def outputs_of(text: str | bytes, **more: Any) -> list[Tensor]:
    """Return the outputs of one response with text."""
    outputs = [text_tensor("text_output", text)]
    for name, value in more.items():
        if isinstance(value, int):
            outputs.append(Tensor(name, "INT32", [1], value.to_bytes(4, "little")))
        else:
            outputs.append(text_tensor(name, value))
    return outputs


class Script:
    """A model that responds as the test says, and remembers what it was asked."""

    def __init__(self, respond: Callable[[Script, Request], None] | None = None, *, reads: bool = True) -> None:
        """`reads`: whether its first input is a whole request."""
        self._reads = reads
        #: For scripts that read inputs themselves.
        self.inputs: dict[str, bytes] = {}
        self.asked: list[dict[str, Any]] = []
        self.requests: list[Request] = []
        self.instance: InProcessInstance
        self.got_request = asyncio.Event()
        self._respond = respond or Script.say_hello

    def __call__(self, request: Request) -> None:
        if self._reads:
            self.asked.append(json.loads(bytes(request.inputs[0].raw())[4:]))
        self.requests.append(request)
        self.got_request.set()
        self._respond(self, request)

    def send(self, request: Request, text: str | bytes, **more: Any) -> None:
        """Send one response that is not the last."""
        request.respond(Response(request.model_name, "1", request.id, outputs=outputs_of(text, **more), final=False))

    def end(self, request: Request, error: ServingError | None = None) -> None:
        request.respond(Response(request.model_name, "1", request.id, error=error))

    def say_hello(self, request: Request) -> None:
        for word in ("Hello", ",", " world"):
            self.send(request, word)
        self.end(request)


class Door:
    """A running server, and a client."""

    def __init__(self, lab: FrontDoorLab, session: aiohttp.ClientSession, server: OpenAiServer, url: str) -> None:
        self.lab = lab
        self.session = session
        self.server = server
        self.url = url

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        """Return status and JSON of a response."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=data, **more) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(path) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: Any) -> list[Any]:
        """Return the JSON of all events of a stream; "[DONE]" as text, comments as they are."""
        async with self.session.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            return events_of(await response.read())


def events_of(body: bytes) -> list[Any]:
    """Return what is in the events of a stream."""
    assert body.endswith(b"\n\n")
    found: list[Any] = []
    for event in body[:-2].decode().split("\n\n"):
        if event.startswith(":"):
            found.append(event)
            continue
        assert event.startswith("data: ")
        assert "\n" not in event
        text = event.removeprefix("data: ")
        found.append(text if text == "[DONE]" else json.loads(text))
    return found


def run(
    test: Callable[[Door], Awaitable[None]],
    *models: tuple[ModelConfig, Script],
    http: HttpOptions | None = None,
    openai: OpenAiOptions | None = None,
    admin: AdminOptions | None = None,
    traces: TraceSettings | None = None,
) -> None:
    """Run a test with a server in front of these models, and check the kernel after it."""

    async def inner() -> None:
        lab = FrontDoorLab(traces=traces)
        for each, script in models:
            script.got_request = asyncio.Event()
            script.instance = lab.add_model(model_spec(each), script)
        servers = []

        def make(sock: Any) -> OpenAiServer:
            servers.append(
                OpenAiServer(lab.kernel, sock, openai or OpenAiOptions(), http=http, admin=admin, now_s=lambda: NOW_S)
            )
            return servers[0]

        async with listening(make) as port, contextlib.AsyncExitStack() as stack:
            url = f"http://127.0.0.1:{port}"
            session = await stack.enter_async_context(aiohttp.ClientSession(url))
            await test(Door(lab, session, servers[0], url))
        lab.kernel.check()
        assert lab.kernel.budget.used_byte_size == 0

    asyncio.run(inner())


def talk(respond: Any = None, outputs: Any = ALL_OUTPUTS, more: str = "") -> tuple[Any, Script]:
    return config("talk", outputs, more), Script(respond)
