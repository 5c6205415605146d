"""A kernel with small models that respond at once, and a real HTTP server in front of it."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from google.protobuf import text_format

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import model_spec
from kernel.errors import ErrorCode, NotFound, ServerStopping, error_of
from kernel.errors import RequestCancelled as CancelledError
from kernel.loop.clock import LoopClock
from kernel.memory.client_regions import RegionRegistry
from kernel.memory.input_placement import InputPlacer
from kernel.options import HttpOptions
from kernel.records.tracer import Tracer
from kernel.serving.catalog import Catalog, ModelState
from kernel.serving.events import Cancelled, Submitted
from kernel.serving.interface import KernelSettings
from kernel.serving.kernel import Kernel, KernelParts
from kernel.serving.model import Model
from kernel.serving.response import Response
from kernel.settings import LogSettings, TraceSettings
from kernel.testing import FakeInstance
from protocols.http.server import HttpServer
from shm.tensor import Tensor
from tests.protocols.front_door_lab import DirectHelpers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.catalog import IndexItem
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet
    from kernel.serving.request import Request

#: What the server accepts in JSON, in the tests.
MAX_INPUT_SIZE = 1 << 20


def config(name: str, inputs: str, more: str = "") -> ModelConfig:
    """Return the configuration of a model with the inputs `NAME:TYPE:DIMS …`, each with an output OUT_NAME."""
    text = f'name: "{name}" backend: "fake" {more}\n'
    for tensor in inputs.split():
        tensor_name, data_type, dims = tensor.split(":")
        text += f'input {{ name: "{tensor_name}" data_type: TYPE_{data_type} dims: {dims} }}\n'
        text += f'output {{ name: "OUT_{tensor_name}" data_type: TYPE_{data_type} dims: {dims} }}\n'
    return text_format.Parse(text, ModelConfig())


CONFIGS = (
    config("echo", "IN:FP32:[-1]"),
    config("pair", "A:INT32:[2] B:INT32:[2]"),
    config("texts", "IN:STRING:[-1]"),
    config("batched", "IN:FP32:[-1]", "max_batch_size: 8"),
    config("half", "IN:FP16:[-1]"),
    config("repeat", "IN:INT32:[-1]", "model_transaction_policy { decoupled: true }"),
    # Fails with the code that it is sent.
    config("fail", "IN:STRING:[1]"),
    # Responds only when its client has gone.
    config("stuck", "IN:FP32:[-1]"),
)


async def respond_at_once(spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock) -> None:
    """A scheduler that plays the model, too."""
    while True:
        match await inbox.next():
            case Submitted(request=request):
                if spec.name != "stuck":
                    _respond(spec, request)
            case Cancelled(request=request):
                request.fail(CancelledError())


def _respond(spec: ModelSpec, request: Request) -> None:
    if spec.name == "fail":
        code = _data(request.inputs[0])[4:].decode()
        request.fail(error_of(ErrorCode(code), f"asked for {code}"))
    elif spec.name == "repeat":
        for place in range(0, len(_data(request.inputs[0])), 4):
            part = _data(request.inputs[0])[place : place + 4]
            output = Tensor("OUT_IN", "INT32", [1], part)
            request.respond(Response(spec.name, "1", request.id, outputs=[output], final=False))
        request.respond(Response(spec.name, "1", request.id))
    else:
        wanted = {output.name for output in request.outputs}
        outputs = [
            Tensor(f"OUT_{t.name}", t.datatype, list(t.shape), _data(t))
            for t in request.inputs
            if not wanted or f"OUT_{t.name}" in wanted
        ]
        request.respond(Response(spec.name, "1", request.id, outputs=outputs, parameters=dict(request.parameters)))


def _data(tensor: Tensor) -> bytes:
    if tensor.data is not None:
        return bytes(tensor.data)
    assert tensor.span is not None
    return os.pread(tensor.span.lease.region.fd, tensor.span.byte_size, tensor.span.offset)


class FakeRepository:
    """Remembers what it is asked for."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.calls: list[tuple[str, str, Any]] = []

    async def index(self, ready: bool = False) -> list[IndexItem]:
        return self._catalog.index(ready)

    async def load(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        if name == "missing":
            raise NotFound("no such model")
        self.calls.append(("load", name, parameters))

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        self.calls.append(("unload", name, unload_dependents))


def build_kernel() -> Kernel:
    """Return a kernel with all models of `CONFIGS` READY, and `unloaded` that is not. In a running loop."""
    catalog, regions, clock = Catalog(), RegionRegistry(), LoopClock()
    for model_config in CONFIGS:
        model = Model(model_spec(model_config), model_config, 1, respond_at_once, clock)
        model.start()
        model.instances.add(FakeInstance(f"{model.name}_0"))
        catalog.set_state(model.name, 1, ModelState.READY, model=model)
    catalog.set_known({"unloaded"})
    catalog.set_state("unloaded", 1, ModelState.UNAVAILABLE, "unloaded")
    settings = KernelSettings(trace=TraceSettings(), log=LogSettings())
    tracer = Tracer(settings.trace, clock)
    parts = KernelParts(FakeRepository(catalog), DirectHelpers())
    return Kernel(catalog, regions, InputPlacer(regions, 1 << 26), clock, settings, tracer, parts)


def close_kernel(kernel: Kernel) -> None:
    for model in kernel.catalog.ready_models():
        model.close(ServerStopping(""))
    kernel.regions.close()


def bound_socket() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


async def _exchange(
    test: Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]], options: HttpOptions, *, fast_path: bool
) -> None:
    kernel = build_kernel()
    sock = bound_socket()
    server = HttpServer(kernel, sock, options, fast_path=fast_path)
    await server.start()
    address = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        plain = {"Accept-Encoding": "identity"}
        async with aiohttp.ClientSession(address, headers=plain, auto_decompress=False) as session:
            await test(session, kernel)
    finally:
        await server.stop(1.0)
        close_kernel(kernel)


@pytest.fixture(params=[True, False], ids=["fast path", "aiohttp"])
def exchange(
    request: pytest.FixtureRequest,
) -> Callable[[Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]:
    """Return a function that runs a coroutine function with a client and the kernel behind its server.

    Each test runs with the fast path and without it: what clients see is the same.
    """
    options = HttpOptions(max_input_size=MAX_INPUT_SIZE)
    return lambda test: asyncio.run(_exchange(test, options, fast_path=request.param))


@pytest.fixture
def serve() -> Callable[[HttpOptions, Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]:
    """Return a function that runs a coroutine function as `exchange` does, with a server of other options."""
    return lambda options, test: asyncio.run(_exchange(test, options, fast_path=True))


@pytest.fixture
def with_kernel() -> Callable[..., None]:
    """Return a function that runs a coroutine function with a kernel that no server is in front of.

    It takes the factory of the event loop, too.
    """

    def run(
        test: Callable[[Kernel], Awaitable[None]], new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    ) -> None:
        async def inner() -> None:
            kernel = build_kernel()
            try:
                await test(kernel)
            finally:
                close_kernel(kernel)

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(inner())

    return run


@pytest.fixture
def announce_submit() -> Callable[[Model], asyncio.Event]:
    """Return a function that gives an event for a model: it is set when the model has got a request."""

    def announce(model: Model) -> asyncio.Event:
        event, submit = asyncio.Event(), model.submit

        def submit_and_set(request: Request) -> None:
            submit(request)
            event.set()

        model.submit = submit_and_set  # type: ignore[method-assign]
        return event

    return announce
