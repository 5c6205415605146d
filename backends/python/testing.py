"""For the tests of authors of Python models: `load_model` runs a model in the process of the test (docs/authoring.md).

from backends.python.testing import load_model

def test_it_doubles() -> None:
    with load_model("models/double") as model:
        assert model.infer({"IN": [1, 2, 3]})["OUT"].tolist() == [2, 4, 6]

A Python model in the process of its author's tests: arrays in, arrays out, without a server.

The configuration is completed and checked as a server does it, requests are checked by the rules of the kernel, and the
Python backend executes them. Only the transport is missing: no worker process, no shared memory, no scheduler.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from backends.base import ModelArguments, Timings
from backends.python.backend import PythonBackend
from backends.python.testing_host import CallInputs, ModelResponse, RecordingHost
from backends.transport import wire
from backends.worker.request import WorkerRequest
from backends.worker.sequence_batches import SequenceBatches
from kernel.config.gpus import NO_GPUS
from kernel.config.load import from_json
from kernel.config.to_text import to_dict, to_json
from kernel.embedding.arrays import input_tensor
from kernel.embedding.requests import RequestOptions, read_options
from kernel.errors import InternalError, InvalidArgument, ServingError, Unsupported
from kernel.repository.layout import model_folder
from kernel.repository.local import list_repository
from kernel.repository.source import ModelSource
from kernel.serving.request import NO_SINK, Request
from kernel.serving.validation import validate
from shm.tensor import RequestedOutput, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from backends.python.testing_host import ModelFunction
    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.repository.source import PreparedConfig

__all__ = ["CallInputs", "ModelInProcess", "ModelResponse", "ModelStream", "ServingError", "load_model"]

#: How long a test waits for the next response of a model, unless it gives `client_timeout`, in seconds.
RESPONSE_TIMEOUT_S = 60.0


class ModelInProcess:
    """One instance of a Python model. `load_model` makes it; `close`, or the end of a `with` block, finalizes it.

    One thread at a time may call the methods. Several models may be loaded at the same time, each with its own modules.
    """

    def __init__(self, source: ModelSource, host: RecordingHost, override: str | None, version: int | None) -> None:
        """Complete the configuration and load the model. Raises `ServingError`."""
        self._host = host
        self._numbers = itertools.count(1)
        #: Correlation id → slot, of the sequences that have begun and not ended.
        self._slots: dict[int | str, int] = {}
        self._backend = PythonBackend(host)
        self._closed = False
        config = source.read(override)
        if config.backend != "python":
            raise Unsupported(
                f"model '{source.name}' has the backend '{config.backend}': load_model runs Python models only. "
                "kernel.embedding.EmbeddedServer serves a model of any backend in a test"
            )
        number = _chosen_version(source, config, version)
        with self._turn(), _arguments_of_the_process():
            completed = self._backend.complete(ModelArguments(to_dict(config), source.path, number))
            prepared = source.prepare(source.complete(config, to_json(_config_of(completed, source.name))))
            #: The completed configuration, as `/config` of a server shows it. Read only.
            self.config: dict[str, Any] = to_dict(prepared.config)
            self._spec = prepared.spec
            host.expect(prepared.spec)
            arguments = _instance_arguments(source, prepared, number)
            self._sequences = SequenceBatches.of_model(arguments)
            self._backend.load(arguments)

    @property
    def logged(self) -> list[tuple[str, str]]:
        """The lines that the model has logged with `pb_utils.Logger`, and the backend's lines: (level, text)."""
        return self._host.logged

    @property
    def controlled(self) -> list[tuple[str, str]]:
        """What the model did with other models: (action, name), where the action is load, unload or ready."""
        return self._host.calls.controlled

    # ---- requests ----------------------------------------------------------------------------

    def infer(self, inputs: Mapping[str, Any], **options: Unpack[RequestOptions]) -> ModelResponse:
        """Execute one request alone, and return its only response. Raises the response's `ServingError`.

        `inputs` maps names to arrays, or to lists and numbers, which are converted to the model's datatypes. Shapes
        include the batch dimension if the model batches. `options` are those of `EmbeddedServer.infer`. Raises
        `InternalError` if the model sends another number of responses than 1.
        """
        responses = list(self.stream(inputs, **options))
        if len(responses) != 1:
            raise InternalError(f"model '{self._spec.name}' sent {len(responses)} responses; `stream` returns them all")
        return responses[0]

    def stream(self, inputs: Mapping[str, Any], **options: Unpack[RequestOptions]) -> ModelStream:
        """Execute one request, and return an iterator over its responses. The iteration raises their errors."""
        request = self._request(inputs, read_options(options))
        self._execute([request])
        return ModelStream(self._host, request, self._spec.name, options.get("client_timeout"))

    def infer_batch(
        self, batch: Sequence[Mapping[str, Any]], **options: Unpack[RequestOptions]
    ) -> list[ModelResponse | ServingError]:
        """Execute the requests with one call of `execute`. Returns the response or the error of each, in their order.

        `options` are for every request. Raises `ServingError` for requests that a server would refuse.
        """
        given = read_options(options)
        requests = [self._request(inputs, given) for inputs in batch]
        self._execute(requests)
        results: list[ModelResponse | ServingError] = []
        for request in requests:
            stream = ModelStream(self._host, request, self._spec.name, given.get("client_timeout"))
            try:
                [response] = stream
                results.append(response)
            except ServingError as error:
                results.append(error)
            except ValueError:
                results.append(InternalError("the model did not send a single response"))
        return results

    def _request(self, inputs: Mapping[str, Any], given: RequestOptions) -> WorkerRequest:
        """Return a checked request. Raises `ServingError`."""
        if self._closed:
            raise InvalidArgument(f"model '{self._spec.name}' is closed")
        expected = {name: tensor.datatype for name, tensor in self._spec.inputs.items()}
        outputs = [RequestedOutput(name) for name in given.get("outputs", ())]
        request = Request(
            self._spec.name,
            [input_tensor(name, value, expected.get(name)) for name, value in inputs.items()],
            NO_SINK,
            id=given.get("request_id", ""),
            outputs=outputs,
        )
        validate(request, self._spec)
        start, end = given.get("sequence_start", False), given.get("sequence_end", False)
        ref = wire.RequestMessage(
            next(self._numbers),
            [],
            outputs,
            id=request.id,
            flags=wire.SEQUENCE_START * start | wire.SEQUENCE_END * end,
            correlation_id=given.get("correlation_id", 0),
            priority=given.get("priority", 0),
            timeout_us=given.get("timeout_us", 0),
            parameters=dict(given.get("parameters", {})),
        )
        if self._sequences is not None:
            ref.sequence = wire.SequenceEntry(self._slot_of(ref.correlation_id, start=start))
        return WorkerRequest(ref, [_writable(tensor) for tensor in request.inputs], self._host)

    def _slot_of(self, correlation_id: int | str, *, start: bool) -> int:
        name = self._spec.name
        if not correlation_id:
            raise InvalidArgument(
                f"inference request to model '{name}' must specify a non-zero or non-empty correlation ID"
            )
        if start:
            self._slots[correlation_id] = next(self._numbers)
        elif correlation_id not in self._slots:
            raise InvalidArgument(
                f"inference request for sequence {correlation_id} to model '{name}' must specify the START flag on "
                "the first request of the sequence"
            )
        return self._slots[correlation_id]

    def _execute(self, requests: list[WorkerRequest]) -> None:
        """Let the model execute the requests; again those that it gives back (iterative sequences)."""
        given = {request.ref.number: list(request.inputs) for request in requests}
        for request in requests:
            self._host.open(request)
        while requests:
            rows = requests
            if self._sequences is not None:
                rows = self._sequences.rows([request.ref for request in requests], requests)
            with self._turn():
                self._run(rows)
            rescheduled = [request.ref for request in self._host.take_rescheduled()]
            self._end_sequences([request for request in requests if request.ref not in rescheduled])
            for ref in rescheduled:
                ref.flags &= ~wire.SEQUENCE_START  # the sequence has begun
            requests = [WorkerRequest(ref, list(given[ref.number]), self._host) for ref in rescheduled]

    def _end_sequences(self, requests: list[WorkerRequest]) -> None:
        """Free the slots and states of sequences whose last request has its response."""
        if self._sequences is None:
            return
        for request in requests:
            if request.ref.flags & wire.SEQUENCE_END and request.finished:
                slot = self._slots.pop(request.ref.correlation_id, None)
                if slot is not None:
                    self._sequences.state.end(slot)

    def _run(self, rows: list[WorkerRequest]) -> None:
        """Call the backend, and fail the requests if that raises, as a worker does."""
        timings = Timings(0, 0, 0)
        try:
            self._backend.execute(rows, timings)
        except ServingError as error:
            for request in rows:
                if not request.finished:
                    request.fail(error)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Give the interpreter to this model for the block: its modules, and the instance that `pb_utils` works for."""
        outer = _running[-1] if _running else None
        if outer is self:  # a model that is called by itself
            yield
            return
        if outer is not None:
            outer._backend.leave_turn()
        _running.append(self)
        self._backend.enter_turn()
        try:
            yield
        finally:
            self._backend.leave_turn()
            _running.pop()
            if outer is not None:
                outer._backend.enter_turn()

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Call the model's `finalize`. A second call does nothing."""
        if not self._closed:
            self._closed = True
            with self._turn():
                self._backend.finalize()

    def __enter__(self) -> ModelInProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


#: The models whose code runs now, the innermost last: a test may let one model respond to the calls of another.
_running: list[ModelInProcess] = []


class ModelStream:
    """An iterator over the responses of one request. A response with an error is raised; more may follow it."""

    def __init__(self, host: RecordingHost, request: WorkerRequest, model: str, timeout_s: float | None) -> None:
        self._host = host
        self._request = request
        self._model = model
        self._timeout_s = RESPONSE_TIMEOUT_S if timeout_s is None else timeout_s
        self._ended = False

    def __iter__(self) -> ModelStream:
        return self

    def __next__(self) -> ModelResponse:
        while not self._ended:
            try:
                recorded = self._host.next_response(self._request, self._timeout_s)
            except queue.Empty:
                raise TimeoutError(
                    f"model '{self._model}' did not send its final response within {self._timeout_s:g} s"
                ) from None
            self._ended = recorded.final
            if recorded.error is not None:
                raise recorded.error
            if recorded.response is not None:
                return recorded.response
        raise StopIteration

    def cancel(self) -> None:
        """Cancel the request, as a client that goes away: `is_cancelled` of the model's request becomes true."""
        self._host.cancel(self._request)


def load_model(
    path: str | Path,
    *,
    version: int | None = None,
    config: Mapping[str, Any] | None = None,
    parameters: Mapping[str, str] | None = None,
    calls: Mapping[str, ModelFunction] | None = None,
) -> ModelInProcess:
    """Load the Python model in the folder `path`, which has config.pbtxt and the folders of the versions.

    Args:
        version: the version to load; by default the newest that the version policy selects.
        config: fields that replace the fields of config.pbtxt, in the form of `/config`: `{"max_batch_size": 8}`.
        parameters: the model's parameters that are added to config.pbtxt, or replace what it has: name → value.
        calls: what responds to the model's calls of other models: name of a model → a function that gets a `CallInputs`
            (input name → array) and returns output name → array; a generator of such for a decoupled model. It may
            raise a `ServingError`, and it may use another loaded model.

    Returns the loaded model: use it in a `with` block, or close it. Raises `ServingError` with the text that a server
    would log if it could not load the model.
    """
    folder = Path(path).resolve()
    entries = list_repository(str(folder.parent), only=folder.name)
    if not entries or not entries[0].is_folder:
        raise InvalidArgument(f"'{folder}' is not a model's folder: there is no such folder")
    listing = model_folder(str(folder.parent), entries[0])
    source = ModelSource(listing, gpus=NO_GPUS, auto_complete=True)
    override = None
    if config or parameters:
        override = _override(source, config or {}, parameters or {})
    return ModelInProcess(source, RecordingHost(calls or {}), override, version)


def _override(source: ModelSource, config: Mapping[str, Any], parameters: Mapping[str, str]) -> str:
    """Return the configuration with the given fields, in JSON. Raises `ServingError`."""
    fields = to_dict(source.read()) | dict(config)
    given = {name: {"string_value": str(value)} for name, value in parameters.items()}
    fields["parameters"] = fields.get("parameters", {}) | given
    return to_json(_config_of(fields, source.name))


def _config_of(fields: Mapping[str, Any], name: str) -> ModelConfig:
    """Return the configuration with these fields. Raises `BadConfig`."""
    return from_json(msgspec.json.encode(fields), f"the configuration of model '{name}'")


def _chosen_version(source: ModelSource, config: ModelConfig, version: int | None) -> int:
    available = source.versions(config)
    if version is None:
        return max(available)
    if version not in source.folder.versions:
        there = ", ".join(map(str, source.folder.versions))
        raise InvalidArgument(f"model '{source.name}' has no version {version}, only {there}")
    return version


def _instance_arguments(source: ModelSource, prepared: PreparedConfig, version: int) -> ModelArguments:
    """Return what the first instance of the model is loaded with."""
    [group, *_] = prepared.config.instance_group
    return ModelArguments(to_dict(prepared.config), source.path, version, instance_name=f"{group.name}_0")


@contextlib.contextmanager
def _arguments_of_the_process() -> Iterator[None]:
    """Keep `sys.argv`, which a worker empties for its model: here it is the test runner's."""
    arguments = sys.argv
    try:
        yield
    finally:
        sys.argv = arguments


def _writable(tensor: Tensor) -> Tensor:
    """Return an input as it is in an arena: the model may change it, and the test's array does not change."""
    return Tensor(tensor.name, tensor.datatype, tensor.shape, memoryview(bytearray(tensor.data or b"")))
