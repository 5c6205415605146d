"""A server inside a Python program: the server of `naiad run`, in a thread instead of a process.

The program's requests go directly to the kernel, with arrays. The server can also serve other programs over HTTP and
gRPC. Models run in worker processes. The workers end with the server, and the server ends with the program.

Runs a server on an event loop in its own thread, and lets other threads run code on that loop.

All posted callbacks run. After the server has ended, posting raises `NotRunning`. No thread waits forever.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import anyio

from kernel.app import Server, StartFailed
from kernel.config.to_text import to_json
from kernel.embedding.requests import Outputs, RequestOptions, ResponseStream, make_call
from kernel.errors import BadOption, ServingError, Unavailable
from kernel.flags.read import read_keywords
from kernel.operator import ServerOperator
from kernel.options import LogOptions, check_options
from kernel.repository.override import FILE_PREFIX
from kernel.serving.model_figures import model_metadata
from kernel.startup import CannotListen

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from kernel.config.spec import ModelSpec
    from kernel.flags.read import Keyword
    from kernel.options import ListenAddress, ServerOptions
    from kernel.serving.catalog import Catalog, IndexItem
    from kernel.serving.kernel import Kernel
    from kernel.serving.model_figures import ModelMetadata


__all__ = [
    "BadOption",
    "EmbeddedServer",
    "NotRunning",
    "Outputs",
    "RequestOptions",
    "ResponseStream",
    "ServingError",
    "StartFailed",
]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class NotRunning(Unavailable):
    """The embedded server was not started, or has ended."""

    def __init__(self) -> None:
        super().__init__("the server is not running")


class ServerThread(ServerOperator):
    """One run of a server in a program, from start to stop.

    `kernel` and `ports` are set when `start` returns. Only code on the loop may use the kernel.
    """

    owns_process = False  # logging and the garbage collector are the program's

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.kernel: Kernel
        self.ports: Mapping[str, int] = {}
        # A daemon, so that the thread does not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="naiad server", daemon=True)
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        # Reentrant: the garbage collector may call `stop` in a thread that already holds the lock.
        self._lock = threading.RLock()
        #: The loop while callbacks may be posted to it, else None.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested: asyncio.Event
        self._stopping = False
        self._has_served = False

    # ---- for other threads -------------------------------------------------------------------

    def start(self) -> None:
        """Start the server; returns when every front door listens. On `StartFailed` the thread has ended."""
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:  # also an interrupt: the caller has no server to stop
            self.stop()
            raise

    def stop(self) -> None:
        """Drain requests, close front doors and end workers; returns when this is done. More calls do nothing."""
        with self._lock:
            self._stopping = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop_requested.set)
        # The garbage collector may call `stop` in the server's own thread, which cannot wait for itself.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def post(self, callback: Callable[[], object]) -> None:
        """Let the loop call `callback`, which must not raise. Raises `NotRunning`."""
        with self._lock:
            if self._loop is None:
                raise NotRunning
            self._loop.call_soon_threadsafe(callback)

    def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine on the loop and return its result. Raises `NotRunning` if the server ends first."""
        with self._lock:
            if self._loop is None:
                raise NotRunning
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise NotRunning from None

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException
        try:
            anyio.run(
                self._serve,
                backend="asyncio",
                backend_options={"use_uvloop": self.options.event_loop == "uvloop"},
            )
            failure = StartFailed("the server was stopped during its start")
        except (CannotListen, BadOption) as error:
            failure = StartFailed(str(error))
        except StartFailed as error:
            failure = error
        except BaseException as error:  # a bug; the program gets what `start` promises, and the cause beside it
            failure = StartFailed(f"the server has failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            # At the exit of the interpreter, closing the loop fails after a successful run; this is not logged.
            if self._opened.done() and not self._has_served:
                logger.exception("the server has failed")
        if not self._opened.done():
            self._opened.set_exception(failure)

    async def _serve(self) -> None:
        with self._lock:
            self._stop_requested = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            if self._stopping:
                self._stop_requested.set()
        try:
            await Server(self.options, self).run()
            self._has_served = True
        finally:
            with self._lock:
                self._loop = None
            # Callbacks that were posted before run now; coroutines are cancelled when the loop closes.
            await asyncio.sleep(0)

    # ---- ServerOperator ----------------------------------------------------------------------

    async def wait_for_stop(self, stop: asyncio.Event) -> None:
        await self._stop_requested.wait()
        stop.set()

    def advice(self, catalog: Catalog, failed: Sequence[str]) -> str:
        reasons = {item.name: " ".join(item.reason.split()) for item in catalog.index() if item.name in failed}
        shown = "; ".join(f"'{name}': {reason}" for name, reason in reasons.items() if reason)
        return f"{shown}{'; ' * bool(shown)}exit_on_error=False starts without them"

    def opened(self, kernel: Kernel, ports: Mapping[str, int]) -> None:
        self.kernel = kernel
        self.ports = ports
        self._opened.set_result(None)


#: Wildcard address → an address that reaches it from this machine.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class EmbeddedServer:
    """A server in a thread of this program. Any thread may call its methods. All except `stream` and `unload` block.

    Errors are `ServingError` with Triton's texts; a server that is not running raises its subclass `NotRunning`. Log
    lines go to Python's `logging`. With asyncio, use `await asyncio.to_thread(server.infer, …)`.
    """

    def __init__(
        self,
        model_repository: str | Path | Sequence[str | Path] | None = None,
        *,
        options: ServerOptions | None = None,
        **flags: Keyword,
    ) -> None:
        """Check the options; `start` starts the server. Raises `BadOption`.

        `flags` are the flags of `naiad run` as keywords, such as `model_control_mode="explicit"`; a list is
        a repeated flag. Without `model_repository` the server serves the demo models. Some defaults differ from the
        command line. A front door is open only if it has a port (`http_port=0` for a free one) or is enabled
        (`http=True`). It listens on 127.0.0.1 unless it has an address. The server does not poll, because polling
        takes the interpreter from the program's threads; `busy_poll_us` enables it. `options` replaces
        `model_repository` and `flags`; its defaults are as on the command line.
        """
        if options is None:
            options, self._notes = read_keywords({"model_repository": model_repository, **flags}, os.environ)
        elif model_repository is not None or flags:
            raise BadOption("give either options or flags, not both")
        else:
            self._notes = []
        check_options(options)
        own = LogOptions(
            access=options.log.access,
            model_lines_per_s=options.log.model_lines_per_s,
            model_bytes_per_s=options.log.model_bytes_per_s,
        )
        if options.log != own:
            raise BadOption("an embedded server logs by Python's logging: set levels, formats and files there")
        if options.worker_start == "fork":
            raise BadOption(
                "an embedded server cannot fork its workers: it would have to inherit processes in place of the program"
            )
        self._options = options
        self._lock = threading.Lock()
        self._running: ServerThread | None = None
        # Stops the server when this object is garbage-collected, and at the end of the program.
        self._finalizer: weakref.finalize[[], EmbeddedServer] | None = None
        #: Model name and version → generation of the catalog, and the spec, which is valid for this generation.
        self._specs: dict[tuple[str, str], tuple[int, ModelSpec]] = {}

    # ---- start and stop ----------------------------------------------------------------------

    def start(self) -> EmbeddedServer:
        """Load the models, open the front doors, and return this server. Does nothing if the server runs.

        Raises `StartFailed` with a reason of one line; then everything that was started has been stopped.
        """
        with self._lock:
            if self._running is None:
                for note in self._notes:
                    logger.warning("%s", note)
                thread = ServerThread(self._options)
                thread.start()
                self._specs.clear()
                self._running = thread
                self._finalizer = weakref.finalize(self, thread.stop)
        return self

    def stop(self) -> None:
        """Refuse new requests, wait for requests in flight up to `exit_timeout_secs`, and end the workers.

        Returns when all of this is done. Does nothing if the server does not run. A stopped server can be started
        again.
        """
        with self._lock:
            if self._running is not None and self._finalizer is not None:
                self._finalizer.detach()
                thread, self._running, self._finalizer = self._running, None, None
                thread.stop()

    def __enter__(self) -> EmbeddedServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- addresses ---------------------------------------------------------------------------

    @property
    def ports(self) -> Mapping[str, int]:
        """The ports of the open front doors: `http`, `grpc` and `metrics` → port."""
        return self._thread.ports

    @property
    def http_url(self) -> str:
        """The URL of the HTTP front door, such as `http://127.0.0.1:8000`. Raises `KeyError` if it is closed."""
        scheme = "http" if self._options.http.tls is None else "https"
        return f"{scheme}://{self._address('http', self._options.http_listener)}"

    @property
    def grpc_url(self) -> str:
        """The address for gRPC clients, such as `127.0.0.1:8001`. Raises `KeyError` if the front door is closed."""
        return self._address("grpc", self._options.grpc_listener)

    @property
    def metrics_url(self) -> str:
        """The URL of the metrics, such as `http://127.0.0.1:8002/metrics`. Raises `KeyError` if it is closed."""
        return f"http://{self._address('metrics', self._options.metrics_listener)}/metrics"

    def _address(self, door: str, listener: ListenAddress) -> str:
        address = _LOOPBACK.get(listener.address, listener.address)
        port = self.ports.get(door)
        if port is None:
            raise KeyError(f"the {door} port is closed: give EmbeddedServer {door}_port=0 for a free one")
        return f"{f'[{address}]' if ':' in address else address}:{port}"

    # ---- inference ---------------------------------------------------------------------------

    def infer(self, model_name: str, inputs: Mapping[str, Any], **options: Unpack[RequestOptions]) -> Outputs:
        """Execute a request and return its outputs: name → array. The caller owns the arrays.

        `inputs` maps names to arrays, or to objects that NumPy converts to arrays. Shapes include the batch dimension
        if the model batches. Plain lists and numbers are converted to the datatype of the model's input; arrays must
        have that datatype. The input arrays must not change during the call. `options` are those of `RequestOptions`.

        Raises `ServingError`, `TypeError` for an unknown option or `inputs` without names, and `TimeoutError` after
        `client_timeout` seconds, which cancels the request.
        """
        call = make_call(self._thread, self._spec(model_name, options), model_name, inputs, options, streaming=False)
        call.begin()
        try:
            return call.only_outputs()
        except BaseException:
            call.abandon()
            raise

    def stream(self, model_name: str, inputs: Mapping[str, Any], **options: Unpack[RequestOptions]) -> ResponseStream:
        """Begin a request and return an iterator over its responses; a decoupled model may send any number of them.

        Arguments and errors are as for `infer`, with three differences. The iteration raises the errors of the
        request. The input arrays must not change before the first response. `client_timeout` limits the wait for each
        response. Closing the stream, or leaving its `with` block, cancels the request.
        """
        call = make_call(self._thread, self._spec(model_name, options), model_name, inputs, options, streaming=True)
        call.begin()
        return ResponseStream(call)

    def _spec(self, model_name: str, options: RequestOptions) -> ModelSpec:
        version = str(options.get("model_version", ""))
        generation = self._thread.kernel.catalog.generation
        known = self._specs.get((model_name, version))
        if known is not None and known[0] == generation:
            return known[1]
        spec = self._call_kernel(lambda kernel: kernel.served(model_name, version).spec)
        self._specs[model_name, version] = generation, spec
        return spec

    # ---- models ------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Return whether the server takes requests; with strict readiness, whether all models are ready as well."""
        thread = self._thread
        return thread.run(lambda: thread.kernel.server_is_ready())

    def model_ready(self, model_name: str, model_version: str | int = "") -> bool:
        """Return whether a model version can execute requests now.

        Raises `ServingError` for a version that is unknown or not READY.
        """
        thread = self._thread
        return thread.run(lambda: thread.kernel.model_is_ready(model_name, str(model_version)))

    def models(self, *, ready: bool = False) -> list[IndexItem]:
        """Return the repository index: name, version, state and reason of all versions, or of the READY ones.

        Raises `ServingError` if a repository cannot be read.
        """
        kernel = self._thread.kernel
        return self._thread.run(lambda: kernel.repository.index(ready))

    def metadata(self, model_name: str, model_version: str | int = "") -> ModelMetadata:
        """Return name, versions, inputs and outputs of a model, as in `GET /v2/models/NAME`. Raises `ServingError`."""

        def describe(kernel: Kernel) -> ModelMetadata:
            model = kernel.served(model_name, str(model_version))
            versions = [model] if model_version else kernel.catalog.ready_models(model_name)
            return model_metadata(model.spec, [each.version for each in versions])

        return self._call_kernel(describe)

    def config(self, model_name: str, model_version: str | int = "") -> dict[str, Any]:
        """Return the completed configuration of a model, as in `GET /v2/models/NAME/config`. Raises `ServingError`."""
        text = self._call_kernel(lambda kernel: to_json(kernel.served(model_name, str(model_version)).config))
        found: dict[str, Any] = json.loads(text)
        return found

    def load(
        self,
        model_name: str,
        *,
        config: str | Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Load a model, or load it again after changes; returns when it is READY.

        `config` replaces the configuration in the repository. `files` (path in the model's folder → content) replaces
        the whole folder, and needs `config`. Raises `ServingError`, also without `model_control_mode="explicit"`; an
        old version then still serves.
        """
        parameters: dict[str, Any] = {f"{FILE_PREFIX}{path}": content for path, content in (files or {}).items()}
        if config is not None:
            parameters["config"] = config if isinstance(config, str) else json.dumps(config)
        kernel = self._thread.kernel
        self._thread.run(lambda: kernel.repository.load(model_name, parameters))

    def unload(self, model_name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model. Returns before its requests in flight have finished. An unknown name is not an error.

        Raises `ServingError` without `model_control_mode="explicit"`.
        """
        kernel = self._thread.kernel
        self._thread.run(lambda: kernel.repository.unload(model_name, unload_dependents))

    # ---- the thread --------------------------------------------------------------------------

    @property
    def _thread(self) -> ServerThread:
        thread = self._running
        if thread is None:
            raise NotRunning
        return thread

    def _call_kernel(self, function: Callable[[Kernel], _T]) -> _T:
        """Call `function` with the kernel, on the kernel's loop, and return its result."""
        thread = self._thread

        async def call() -> _T:
            return function(thread.kernel)

        return thread.run(call)
