"""A server within a Python program: the same that `python -m kernel run` starts, without a process of its own.

Requests go straight to the kernel, as arrays; other programs can be served beside, over HTTP and gRPC. Models
run in worker processes as ever, which end with the server, and that with the program.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from kernel.app import StartFailed
from kernel.command.flags.keywords import read_keywords
from kernel.config.to_json import to_json
from kernel.embedding.requests import Outputs, RequestOptions, ResponseStream, make_call
from kernel.embedding.server_thread import NotRunning, ServerThread
from kernel.errors import ServingError
from kernel.options import BadOption, LogOptions, check_options
from kernel.repository.override import FILE_PREFIX
from kernel.serving.model_metadata import model_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from kernel.command.flags.keywords import Keyword
    from kernel.config.spec import ModelSpec
    from kernel.options import ListenAddress, ServerOptions
    from kernel.serving.catalog import IndexItem
    from kernel.serving.kernel import Kernel
    from kernel.serving.model_metadata import ModelMetadata

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

#: What to call an address that stands for all of the machine's.
_CALLED = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class EmbeddedServer:
    """A server in a thread of this program. Its methods may be called from any thread.

    Errors are `ServingError` with Triton's texts. A server that is not running raises `NotRunning`, which is one.
    Logs are those of Python's `logging`. With asyncio: `await asyncio.to_thread(server.infer, …)`.
    """

    def __init__(
        self,
        model_repository: str | Path | Sequence[str | Path] | None = None,
        *,
        options: ServerOptions | None = None,
        **flags: Keyword,
    ) -> None:
        """Flags are those of `python -m kernel run` as keywords, such as `model_control_mode="explicit"`.

        A list gives a flag several times. Front doors are closed but those that have a port (0 for any free one)
        or are asked for (`http=True`), and listen on this machine only, unless they have an address. Without a
        repository the demo models are served. It does not poll through waits, which would take the interpreter from
        the program's threads, unless `busy_poll_us` says so. `options` take the place of everything else, also of
        that. Raises `BadOption`.
        """
        if options is None:
            options, self._notes = read_keywords({"model_repository": model_repository, **flags}, os.environ)
        elif model_repository is not None or flags:
            raise BadOption("give either options or flags")
        else:
            self._notes = []
        check_options(options)
        if options.log != LogOptions(access=options.log.access):
            raise BadOption("a server within a program logs by Python's logging: set levels, formats and files there")
        self._options = options
        self._lock = threading.Lock()
        self._running: ServerThread | None = None
        # Stops the server when nobody can reach it any more, and at the end of the program.
        self._finalizer: weakref.finalize[[], EmbeddedServer] | None = None
        #: What was found out about models, and for which state of the catalog it holds.
        self._specs: dict[tuple[str, str], tuple[int, ModelSpec]] = {}

    # ---- start and stop ----------------------------------------------------------------------

    def start(self) -> EmbeddedServer:
        """Load the models and open the front doors; returns this server. One that runs goes on.

        Raises `StartFailed` with a reason of one line; nothing is left running then.
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
        """Refuse new requests, wait for those in flight (`exit_timeout_secs`), end the workers.

        Returns when all is done. A stopped server can be started again; stopping it again does nothing.
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

    # ---- where it listens --------------------------------------------------------------------

    @property
    def ports(self) -> Mapping[str, int]:
        """The ports of the front doors that are open, by `http`, `grpc` and `metrics`."""
        return self._thread.ports

    @property
    def http_url(self) -> str:
        """Where to find the HTTP front door, such as `http://127.0.0.1:8000`. Raises KeyError where there is none."""
        scheme = "http" if self._options.http.tls is None else "https"
        return f"{scheme}://{self._place('http', self._options.http_listener)}"

    @property
    def grpc_url(self) -> str:
        """What gRPC clients connect to, such as `127.0.0.1:8001`. Raises KeyError where there is no such door."""
        return self._place("grpc", self._options.grpc_listener)

    @property
    def metrics_url(self) -> str:
        """Where to find the metrics, such as `http://127.0.0.1:8002/metrics`. Raises KeyError where they are not."""
        return f"http://{self._place('metrics', self._options.metrics_listener)}/metrics"

    def _place(self, door: str, listener: ListenAddress) -> str:
        address = _CALLED.get(listener.address, listener.address)
        return f"{f'[{address}]' if ':' in address else address}:{self.ports[door]}"

    # ---- inference ---------------------------------------------------------------------------

    def infer(self, model_name: str, inputs: Mapping[str, Any], **options: Unpack[RequestOptions]) -> Outputs:
        """Execute a request and return its outputs, arrays by their names.

        `inputs` are arrays, or what NumPy can read as such; plain lists and numbers become the datatype that the
        model wants. Raises `ServingError`, and `TimeoutError` after `client_timeout` seconds.
        """
        call = make_call(self._thread, self._spec(model_name, options), model_name, inputs, options, streaming=False)
        call.begin()
        try:
            return call.only_outputs()
        except BaseException:
            call.abandon()
            raise

    def stream(self, model_name: str, inputs: Mapping[str, Any], **options: Unpack[RequestOptions]) -> ResponseStream:
        """Begin a request and return its responses as they come: any number of them, for a decoupled model.

        Errors of the request itself are raised by the iteration. Leaving it, or the `with` block of the stream,
        cancels the request. As `infer`; `client_timeout` counts for each response.
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
        spec = self._ask(lambda kernel: kernel.resolve(model_name, version).spec)
        self._specs[model_name, version] = generation, spec
        return spec

    # ---- models ------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether the server takes requests, with strict readiness whether all its models do."""
        return self._ask(lambda kernel: kernel.ready())

    def model_ready(self, model_name: str, model_version: str | int = "") -> bool:
        """Whether a model version can execute requests now. Raises for unknown or not ready versions."""
        return self._ask(lambda kernel: kernel.model_ready(model_name, str(model_version)))

    def models(self, *, ready: bool = False) -> list[IndexItem]:
        """Return the repository index: name, version, state and reason of each version, or of those READY."""
        kernel = self._thread.kernel
        return self._thread.run(lambda: kernel.repository.index(ready))

    def metadata(self, model_name: str, model_version: str | int = "") -> ModelMetadata:
        """Return what a model takes and gives, as `GET /v2/models/NAME` does."""

        def describe(kernel: Kernel) -> ModelMetadata:
            model = kernel.resolve(model_name, str(model_version))
            versions = [model] if model_version else kernel.catalog.ready_models(model_name)
            return model_metadata(model.spec, [each.version for each in versions])

        return self._ask(describe)

    def config(self, model_name: str, model_version: str | int = "") -> dict[str, Any]:
        """Return the configuration of a model, completed, as `GET /v2/models/NAME/config` does."""
        text = self._ask(lambda kernel: to_json(kernel.resolve(model_name, str(model_version)).config))
        found: dict[str, Any] = json.loads(text)
        return found

    def load(
        self,
        model_name: str,
        *,
        config: str | Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Load a model, or load it again; returns when it is READY. Needs `model_control_mode="explicit"`.

        `config` takes the place of its configuration, and `files`, contents by path in the model's folder, that
        of the repository.
        """
        parameters: dict[str, Any] = {f"{FILE_PREFIX}{path}": content for path, content in (files or {}).items()}
        if config is not None:
            parameters["config"] = config if isinstance(config, str) else json.dumps(config)
        kernel = self._thread.kernel
        self._thread.run(lambda: kernel.repository.load(model_name, parameters))

    def unload(self, model_name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model; returns at once, requests in flight finish. Unknown names are no error."""
        kernel = self._thread.kernel
        self._thread.run(lambda: kernel.repository.unload(model_name, unload_dependents))

    # ---- the thread --------------------------------------------------------------------------

    @property
    def _thread(self) -> ServerThread:
        thread = self._running
        if thread is None:
            raise NotRunning
        return thread

    def _ask(self, question: Callable[[Kernel], _T]) -> _T:
        """Return the answer of the kernel, which is asked on its own loop."""
        thread = self._thread

        async def ask() -> _T:
            return question(thread.kernel)

        return thread.run(ask)
