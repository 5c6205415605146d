"""The Python backend: runs a model's `TritonPythonModel` unchanged, and holds it to Triton's return rules."""

from __future__ import annotations

import copy
import json
import types
from typing import TYPE_CHECKING, Any

from backends.base import Backend
from backends.python import triton_python_backend_utils
from backends.python.dropped import DroppedRequests
from backends.python.event_loop import EventLoop
from backends.python.failures import reported
from backends.python.instance import PythonInstance, set_current
from backends.python.model_config import ModelConfig
from backends.python.model_file import DEFAULT_NAME, import_model_class
from backends.python.requests import InferenceRequest
from backends.python.responses import InferenceResponse
from kernel.errors import InternalError, ServingError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from backends.base import Config, Host, ModelArguments, Timings
    from backends.worker.request import WorkerRequest


class PythonBackend(Backend):
    """One instance of a Python model, which may answer requests after `execute` by their senders."""

    responds_later = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._model_class: type[Any] | None = None
        self._model: Any = None
        self._model_path = ""
        self._instance: PythonInstance
        self._dropped: DroppedRequests | None = None
        self._loop: EventLoop | None = None

    def complete(self, arguments: ModelArguments) -> Config:
        """Return what the model's `auto_complete_config` makes of the configuration, if it has one."""
        config = copy.deepcopy(arguments.config)
        auto_complete = getattr(self._import(arguments), "auto_complete_config", None)
        if auto_complete is None:
            return config
        with reported():
            completed = auto_complete(ModelConfig(json.dumps(config)))
        if not isinstance(completed, ModelConfig):
            raise InternalError(
                f"auto_complete_config function in model '{arguments.model_name}' must return a valid "
                "pb.ModelConfig object."
            )
        return completed.as_dict()

    def load(self, arguments: ModelArguments) -> None:
        """Import the model's file, make the model and initialize it."""
        model_class = self._import(arguments)
        if arguments.parameter("EXECUTION_ENV_PATH"):
            self.host.log(
                "WARNING",
                f"model '{arguments.model_name}': EXECUTION_ENV_PATH is not supported yet, the model runs in "
                "the server's own Python environment",
            )
        self._instance = PythonInstance(arguments, self.host)
        set_current(self._instance)
        self._model_path = str(arguments.model_file(DEFAULT_NAME))
        with reported():
            self._model = model_class()
            if hasattr(self._model, "initialize"):
                self._model.initialize(_initialize_arguments(arguments))
        self._dropped = DroppedRequests(self._instance.name)
        self._dropped.start()

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """Hand the requests to the model as one batch, and send what it returns."""
        assert self._dropped is not None, "execute before load"
        instance = self._instance
        if len(requests) > 1 or instance.max_batch_size > 0:
            self._check_batch_size(requests)
        if instance.reshaped_inputs:
            for request in requests:
                instance.reshape_inputs(request)
        given = InferenceRequest.received(requests, instance, self._dropped.add)
        # As `timings.inputs_ready()` and `inferred()`, without a call for each batch.
        timings.inputs_ready_ns = timings.inferred_ns = timings.clock()
        try:
            try:
                returned = self._call(given)
            finally:
                timings.inferred_ns = timings.clock()  # a model that raises has worked as well
            if instance.decoupled:
                self._check_decoupled(returned)
            if returned is not None:
                self._respond(given, returned)
            else:  # the model uses response senders
                for open_request in given:
                    open_request.outlive_execute()
        except BaseException as error:
            # The worker answers what is open; threads of the model come too late from here on.
            for open_request in given:
                open_request.close()
            if isinstance(error, ServingError):
                self.host.log("ERROR", error.message)
            raise

    def finalize(self) -> None:
        """Call the model's `finalize`, then end what runs on the event loop. Errors are logged only."""
        if hasattr(self._model, "finalize"):
            try:
                with reported(f"finalize of model '{self._instance.name}' failed: "):
                    self._model.finalize()
            except ServingError as error:
                self.host.log("ERROR", error.message)
        if self._loop is not None:
            self._loop.stop()
        if self._dropped is not None:
            self._dropped.stop()

    def _import(self, arguments: ModelArguments) -> type[Any]:
        """Return the model's class; the file is imported once for `complete` and `load`."""
        if self._model_class is None:
            triton_python_backend_utils.install()
            set_current(PythonInstance(arguments, self.host))
            self._model_class = import_model_class(arguments)
        return self._model_class

    def _check_batch_size(self, requests: Sequence[WorkerRequest]) -> None:
        """Refuse what no scheduler of ours makes, but a warm-up may ask for: too many rows, or requests."""
        limit = self._instance.max_batch_size
        size = len(requests)
        if limit > 0:
            size = 0
            for request in requests:
                if request.inputs:
                    size += request.inputs[0].shape[0]
        if size > 1 and size > limit:
            raise InternalError(f"batch size {size} for '{self._instance.name}', max allowed is {limit}")

    def _call(self, given: list[InferenceRequest]) -> object:
        """Return what the model's `execute` returns, None where it goes on by itself (async, decoupled)."""
        execute = getattr(self._model, "execute", None)
        if execute is None:
            raise self._failed(f"Python model {self._model_path} does not implement `execute` method.")
        try:
            returned = execute(list(given))
        except BaseException as error:
            # Where it matters how long a batch takes: a context costs more than the call.
            with reported(self._instance.failure_prefix):
                raise error
        if not isinstance(returned, types.CoroutineType):
            return returned
        if self._loop is None:
            self._loop = EventLoop()
            self._loop.start()
        if not self._instance.decoupled:
            return self._loop.submit(self._await(returned)).result()
        self._loop.submit(self._await_decoupled(returned, given))
        return None

    async def _await(self, coroutine: Coroutine[Any, Any, object]) -> object:
        with reported(self._instance.failure_prefix):
            return await coroutine

    async def _await_decoupled(self, coroutine: Coroutine[Any, Any, object], given: list[InferenceRequest]) -> None:
        """Wait for a decoupled model's `execute`; an error ends the requests that have not ended."""
        try:
            self._check_decoupled(await self._await(coroutine))
        except ServingError as error:
            self.host.log("ERROR", error.message)
            for request in given:
                request.fail(error)

    def _check_decoupled(self, returned: object) -> None:
        if returned is not None:
            raise self._failed(
                f"Python model '{self._instance.name}' is using the decoupled mode and the execute function "
                "must return None."
            )

    def _respond(self, given: list[InferenceRequest], returned: object) -> None:
        """Send the returned responses. None in place of one: the model uses the request's sender."""
        if not isinstance(returned, list) or len(returned) != len(given):
            raise self._failed(_wrong_return(returned, len(given)))
        for response in returned:
            if response is not None and not isinstance(response, InferenceResponse):
                raise self._failed(
                    "Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response)}'."
                )
        for index, request in enumerate(given):
            response = returned[index]
            if response is None:
                request.outlive_execute()
            elif not request.answer(response):
                self.host.log(
                    "WARNING",
                    f"model '{self._instance.name}' returned a response for a request that it had answered "
                    "by its response sender; the returned one is dropped",
                )

    def _failed(self, reason: str) -> InternalError:
        return InternalError(self._instance.failure_prefix + reason)


def _wrong_return(returned: object, count: int) -> str:
    """Say what is wrong with a return value that is not a list of `count` elements."""
    if not isinstance(returned, list):
        return f"Expected a list in the execute return, found type '{type(returned)}'."
    return (
        "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
        f"InferenceRequest(s) size is:{count}, and InferenceResponse(s) size is:{len(returned)}\n"
    )


def _initialize_arguments(arguments: ModelArguments) -> dict[str, str]:
    """What `initialize` gets: all values are strings."""
    return {
        "model_config": json.dumps(arguments.config, separators=(",", ":"), ensure_ascii=False),
        "model_instance_kind": arguments.kind,
        "model_instance_name": arguments.instance_name,
        "model_instance_device_id": str(arguments.device_id),
        "model_repository": str(arguments.model_dir),
        "model_version": str(arguments.version),
        "model_name": arguments.model_name,
    }
