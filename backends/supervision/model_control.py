"""Requests of a model to load and unload models, and to ask whether a model is ready."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from backends.transport import wire
from backends.transport.texts import shortened
from kernel.background import BackgroundTasks
from kernel.errors import InvalidArgument, ServingError
from kernel.repository.override import MAX_FILES_BYTE_SIZE
from kernel.serving.catalog import parse_version

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from backends.supervision.session import WorkerSession
    from kernel.serving.kernel import Kernel


@contextlib.contextmanager
def while_loading(control: ModelControl | None, config: str) -> Iterator[None]:
    """Let the server know what waits for the model of `config`, which may load other models in this block."""
    if control is not None:
        control.loading = str(msgspec.json.decode(config, type=dict[str, Any]).get("name", ""))
    try:
        yield
    finally:
        if control is not None:
            control.loading = ""


class ModelControl:
    """Does what the model of one worker asks for. What was begun continues when the worker is lost."""

    def __init__(self, session: WorkerSession, kernel: Kernel) -> None:
        self._session = session
        self._kernel = kernel
        #: The name of the worker's model while it is loaded, else empty.
        self.loading = ""
        #: By call, the files that were received.
        self._files: dict[int, dict[str, bytearray]] = {}
        self._tasks = BackgroundTasks()
        session.control = self.take

    def take(self, message: wire.ControlModel | wire.ModelFile) -> None:
        """Take a message of the worker. Raises ValueError for a message that breaks the protocol."""
        if isinstance(message, wire.ModelFile):
            self._add_file(message)
            return
        files = self._files.pop(message.call, {})
        match message.action:
            case "ready":
                self._respond_ready(message)
            case "load":
                self._tasks.start(self._tried(message.call, lambda: self._load(message, files)))
            case "unload":
                self._tasks.start(self._tried(message.call, lambda: self._unload(message)))
            case action:
                raise ValueError(f"the action '{action[:20]}' with a model")

    def _add_file(self, message: wire.ModelFile) -> None:
        files = self._files.setdefault(message.call, {})
        held = sum(len(data) for each in self._files.values() for data in each.values())
        if held <= MAX_FILES_BYTE_SIZE:  # what comes beyond that is dropped: `_load` refuses
            files.setdefault(message.path, bytearray()).extend(message.data)

    def _respond_ready(self, message: wire.ControlModel) -> None:
        try:
            name, version = message.model_name, message.model_version
            if version and not self._kernel.catalog.has_label(name, version):
                parse_version(version)
        except ServingError as error:
            self._fail(message.call, error)
            return
        try:
            ready = self._kernel.live() and self._kernel.model_ready(message.model_name, message.model_version)
        except ServingError:  # as in Triton: an unknown model is not ready
            ready = False
        self._respond(message.call, ready=ready)

    async def _load(self, message: wire.ControlModel, files: dict[str, bytearray]) -> None:
        if sum(map(len, files.values())) > MAX_FILES_BYTE_SIZE:
            raise InvalidArgument(f"the files of a load request have more than {MAX_FILES_BYTE_SIZE} bytes")
        parameters: dict[str, Any] = {path: memoryview(data) for path, data in files.items()}
        if message.config is not None:
            parameters["config"] = message.config
        model, nested = self.loading, self._kernel.nested_loads
        if model:
            nested.begin(model, message.model_name)
        try:
            await self._kernel.repository.load(message.model_name, parameters)
        finally:
            if model:
                nested.end(model, message.model_name)

    async def _unload(self, message: wire.ControlModel) -> None:
        await self._kernel.repository.unload(message.model_name, message.unload_dependents)

    async def _tried(self, call: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do `work` and send its result to the worker."""
        try:
            await work()
        except ServingError as error:
            self._fail(call, error)
        else:
            self._respond(call)

    def _fail(self, call: int, error: ServingError) -> None:
        self._session.send(wire.ModelControlled(call, False, error.code.value, shortened(error.message)))

    def _respond(self, call: int, *, ready: bool = False) -> None:
        self._session.send(wire.ModelControlled(call, ready))
