"""Starts a complete server in this process with a command line. Its models need no workers.

Tests see the effects of flags over HTTP and gRPC, in the log, and in the arguments of parts that kernel/app.py creates.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import tempfile
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any
from unittest import mock

import grpc

from kernel import app
from kernel.errors import BadOption
from kernel.observe.logs import set_up_logging
from kernel.tools.cli import cli
from kernel.tools.terminal import Terminal
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.server import GrpcServer
from protocols.http.metrics.server import MetricsServer
from protocols.openai.server import OpenAiServer
from tests.kernel.repository_lab import CONFIG, EchoInstance, FakeKeeper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from kernel.observe.logs import ServerLog
    from kernel.repository.lifecycle import Lifecycle
    from kernel.serving.batch import Batch
    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model
    from kernel.settings import LogSettings

#: The first flags of every server. Tests may override them, because the last value of a flag counts.
FREE_PORTS = tuple(
    f"--{door}-{what}" for door in ("http", "grpc", "metrics") for what in ("address=127.0.0.1", "port=0")
)


class Supervisor(FakeKeeper):
    """Replaces the supervisor of an instance. It starts no worker, and records its arguments."""

    def __init__(self, running: Running, poller: Any, options: dict[str, Any]) -> None:
        super().__init__([])
        self.poller = poller
        self.options = options
        self.completed = False
        self._running = running
        running.supervisors.append(self)

    async def complete(
        self, config: str, model_dir: str, version: int, backend_config: dict[str, str], *, verify: bool = False
    ) -> str:
        self.completed = True
        return config

    def join(self, model: Model) -> EchoInstance:
        super().join(model)
        assert self.plan is not None
        self.instance = NotingInstance(self.plan.name, model, self._running)
        return self.instance


class NotingInstance(EchoInstance):
    """Records the parameters of requests."""

    def __init__(self, name: str, model: Model, running: Running) -> None:
        super().__init__(name, model, "")
        self._running = running

    def execute(self, batch: Batch) -> None:
        self._running.parameters += [dict(request.parameters) for request in batch.requests]
        super().execute(batch)


class Response:
    """The response to an HTTP request."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.text = body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Running:
    """A running server, and the records of its parts."""

    def __init__(self, *, forks: bool) -> None:
        #: Whether workers may be forked.
        self.forks = forks
        self.kernel: Kernel
        self.ports: Mapping[str, int] = {}
        self.supervisors: list[Supervisor] = []
        #: The parameters of the requests that models have executed.
        self.parameters: list[dict[str, Any]] = []
        self.grpc: Any = None
        self.metrics: Any = None
        self.openai: Any = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.log: list[str] = []
        #: The text that was printed to standard error.
        self.errors = ""

    @property
    def lifecycle(self) -> Lifecycle:
        return self.kernel.repository  # type: ignore[return-value]

    def call(
        self, path: str, body: object = None, headers: Mapping[str, str] | None = None, *, door: str = "http"
    ) -> Response:
        """Send an HTTP request and return the response. Blocks, so it must run in a thread."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.ports[door]}{path}"
        request = urllib.request.Request(url, data, headers=dict(headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=60) as found:
                return Response(found.status, dict(found.headers), found.read())
        except urllib.error.HTTPError as error:
            with error:
                return Response(error.code, dict(error.headers), error.read())

    def infer(self, headers: Mapping[str, str] | None = None) -> Response:
        tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
        return self.call("/v2/models/m/infer", {"inputs": [tensor]}, headers)

    def infer_over_grpc(self, **metadata: str) -> grpc.StatusCode:
        """Send an inference request over gRPC and return its status."""
        tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[1])
        message = pb.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[bytes(4)])
        with grpc.insecure_channel(f"127.0.0.1:{self.ports['grpc']}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            try:
                call(message.SerializeToString(), metadata=tuple(metadata.items()), timeout=60)
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
        return grpc.StatusCode.OK


class _TestTerminal(Terminal):
    """A terminal that runs `look` in a thread when the server is open, and then stops the server."""

    running: Running
    look: Callable[[Running], object]
    found: object = None

    def begin(self, log: LogSettings) -> None:
        super().begin(log)
        self._open = asyncio.Event()

    async def wait_for_stop(self, stop: asyncio.Event) -> None:
        self.running.loop = asyncio.get_running_loop()
        await self._open.wait()
        try:
            type(self).found = await asyncio.to_thread(self.look, self.running)
        finally:
            stop.set()

    def opened(self, kernel: Kernel, ports: Mapping[str, int]) -> None:
        self.running.kernel, self.running.ports = kernel, ports
        self._open.set()


@contextlib.contextmanager
def _own_log(lines: list[str]) -> Iterator[None]:
    """Let the server set up the log of this process, append the lines to `lines`, and restore the log afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.name} {record.getMessage()}")

    def set_up(log: LogSettings) -> ServerLog:
        server_log = set_up_logging(log)
        root.addHandler(Lines())
        return server_log

    levels = {name: logging.getLogger(name).level for name in ("asyncio", "aiohttp", "grpclib", "hpack", "h2")}
    try:
        with mock.patch("kernel.tools.terminal.set_up_logging", set_up):
            yield
    finally:
        for handler in root.handlers[:]:
            root.removeHandler(handler)
            handler.close()
        for handler in handlers:
            root.addHandler(handler)
        root.setLevel(level)
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)
        logging.captureWarnings(False)


def run_server(words: Iterable[str], look: Callable[[Running], object]) -> tuple[Running, object]:
    """Start a server with `naiad run WORDS`, call `look`, and stop the server. Returns the result of `look`.

    If the server does not start, the result is None, and `Running.errors` has the reason.
    """
    words = list(words)
    running = Running(forks=any(word.startswith("--worker-start") for word in words))

    class Operator(_TestTerminal):
        #: Workers may be forked only in the test of that flag, because the process has all other tests, too.
        owns_process = running.forks

    class SeenGrpcServer(GrpcServer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            running.grpc = self

    class SeenMetricsServer(MetricsServer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            running.metrics = self

    class SeenOpenAiServer(OpenAiServer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            running.openai = self

    def supervisor(launcher: object, poller: object, helper: object, **options: object) -> Supervisor:
        return Supervisor(running, poller, {**options, "launcher": launcher})

    Operator.running, Operator.look = running, staticmethod(look)
    with (
        open(os.devnull, "w") as nowhere,
        tempfile.TemporaryFile("w+") as errors,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(errors),
        _own_log(running.log),
        mock.patch.object(app, "Terminal", Operator),
        mock.patch("protocols.grpc.server.GrpcServer", SeenGrpcServer),
        mock.patch("protocols.http.metrics.server.MetricsServer", SeenMetricsServer),
        mock.patch("protocols.openai.server.OpenAiServer", SeenOpenAiServer),
        mock.patch.object(app, "InstanceSupervisor", supervisor),
    ):
        try:
            cli(["run", *FREE_PORTS, *words], standalone_mode=False)
        except BadOption as error:  # the command line prints it
            running.errors = str(error)
        errors.seek(0)
        running.errors += errors.read()
    return running, Operator.found


def write_model(root: Path, name: str, config: str = CONFIG) -> None:
    """Write a model whose responses are empty."""
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
