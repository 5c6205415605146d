"""The Python backend: executes a model's `TritonPythonModel` unchanged, by Triton's rules for return values.

`is_ready` of a model: whether it is healthy, as it says itself (Triton since 2026-03).

Python-based backends: a folder of --backend-directory whose `model.py` runs models that have none themselves.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
from typing import TYPE_CHECKING, Any

import msgspec

from backends.base import Backend
from backends.python import triton_python_backend_utils
from backends.python.calls import ExecutedRequests, executed
from backends.python.event_loop import EventLoop, Paced
from backends.python.failures import describe, model_code, model_failure, without_tracebacks, wrong_return
from backends.python.former_names import add_former_names
from backends.python.instance import PythonInstance, forget_instance, set_current_instance
from backends.python.model_config import ModelConfig
from backends.python.model_file import DEFAULT_NAME, import_model_class
from backends.python.model_modules import ModelModules
from backends.python.requests import InferenceRequest
from backends.python.responses import DroppedRequests, InferenceResponse
from backends.worker.message_reader import KernelGone
from kernel.errors import BadConfig, InternalError, ServingError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path
    from typing import ClassVar

    from backends.base import Config, Host, ModelArguments, Timings
    from backends.worker.request import WorkerRequest


#: Libraries with which models compute on GPUs.
_DEVICE_LIBRARIES = ("cupy", "jax", "numba.cuda", "tensorflow", "torch")

#: The parameter with the number of batches that an instance executes at the same time. The kernel has checked it.
CONCURRENCY = "naiad.concurrency"


class PythonBackend(Backend):
    """One instance of a Python model. With response senders the model may respond after `execute` has returned."""

    shares_worker = True
    responds_later = True
    opens_device_late = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._model_class: type[Any] | None = None
        self._model: Any = None
        self._model_path = ""
        self._instance: PythonInstance
        self._dropped: DroppedRequests | None = None
        #: Takes a dropped request. Set with the first batch.
        self._on_dropped: Callable[[WorkerRequest, bool], None] | None = None
        self._loop: EventLoop | None = None
        #: Only in a process of several models.
        self._modules: ModelModules | None = None
        self._current: PythonInstance | None = None
        self._concurrency = 1

    def enter_turn(self) -> None:
        if self._modules is not None:
            self._modules.enter()
        if self._current is not None:
            set_current_instance(self._current)

    def leave_turn(self) -> None:
        if self._modules is not None:
            self._modules.leave()

    def complete(self, arguments: ModelArguments) -> Config:
        """See `Backend.complete`. Calls the model's `auto_complete_config`, if it has this method."""
        config = dict(arguments.config)
        auto_complete = getattr(self._import_model_class(arguments), "auto_complete_config", None)
        if auto_complete is None:
            return config
        self.completed_by_model = True
        with model_code():
            completed = auto_complete(ModelConfig(json.dumps(config)))
        if not isinstance(completed, ModelConfig):
            raise InternalError(
                f"auto_complete_config function in model '{arguments.model_name}' must return a valid "
                "pb.ModelConfig object."
            )
        return completed.as_dict()

    def verify(self, arguments: ModelArguments) -> None:
        """See `Backend.verify`. Imports the model's file; a server would find out with the first request."""
        if not callable(getattr(self._import_model_class(arguments), "execute", None)):
            path = arguments.model_file(DEFAULT_NAME)
            raise InternalError(f"Python model {path} does not implement `execute` method.")

    def load(self, arguments: ModelArguments) -> None:
        """Import the model's file, create the model object and call its `initialize`."""
        model_class = self._import_model_class(arguments)
        self._instance = self._current = PythonInstance(arguments, self.host)
        set_current_instance(self._instance)
        self._model_path = str(arguments.model_file(DEFAULT_NAME))
        if self.host.device is not None:
            from backends.python.device_tensors import use_gpu  # few servers have GPUs

            use_gpu(self._instance, self.host.device)
            if arguments.device_id and any(library in sys.modules for library in _DEVICE_LIBRARIES):
                self.host.device.open()  # the library computes on the thread's current device, by default the first
            self.device_inputs = self._instance.inputs_stay
        with model_code():
            self._model = model_class()
            if hasattr(self._model, "initialize"):
                self._model.initialize(_initialize_arguments(arguments))
        self._concurrency = _concurrency(arguments, self._model)
        self._dropped = DroppedRequests(self._instance.name, self.host.calls, self.host.log)
        self._instance.call_discarder = self._dropped.call_discarder
        self._instance.may_call = True

    @property
    def concurrency(self) -> int:
        return self._concurrency

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """Call the model's `execute` with the requests, and send the responses that it returns."""
        on_dropped = self._on_dropped or self._first_batch()
        instance = self._instance
        # Repeats `_received` and `_take`, to save two calls for each batch.
        if len(requests) > 1 or instance.max_batch_size > 0:
            self._check_batch_size(requests)
        if instance.reshaped_inputs:
            for request in requests:
                instance.reshape_inputs(request)
        batch = InferenceRequest.received(requests, instance, on_dropped)
        # The same as `inputs_ready` and `inferred`, without two calls.
        timings.inputs_ready_ns = timings.inferred_ns = timings.clock()
        try:
            try:
                returned = self._call(batch)
            finally:
                timings.inferred_ns = timings.clock()  # also for a model that raises
            if instance.decoupled:
                self._check_decoupled(returned)
            if returned is not None:
                self._respond(batch, returned)
            else:  # the model uses response senders
                for open_request in batch:
                    open_request.leave_open()
        except BaseException as error:
            # The worker ends the open requests; later responses from threads of the model are refused.
            for open_request in batch:
                open_request.close()
            if isinstance(error, ServingError):
                self.host.log("ERROR", error.message)
            raise

    def begin(
        self, requests: list[WorkerRequest], timings: Timings, ended: Callable[[ServingError | None], None]
    ) -> None:
        """See `Backend.begin`. Runs the model's `async def execute` on the event loop."""
        try:
            batch = self._received(requests, timings)
        except ServingError as error:
            self.host.log("ERROR", error.message)
            ended(error)
            return
        self._event_loop().start_task(self._overlap(batch, timings, ended))

    def _received(self, requests: Sequence[WorkerRequest], timings: Timings) -> list[InferenceRequest]:
        """Return the requests for the model. Raises `InternalError` for too many."""
        on_dropped = self._on_dropped or self._first_batch()
        self._check_batch_size(requests)
        for request in requests:
            self._instance.reshape_inputs(request)
        timings.inputs_ready()
        return InferenceRequest.received(requests, self._instance, on_dropped)

    def _first_batch(self) -> Callable[[WorkerRequest, bool], None]:
        assert self._dropped is not None, "execute before load"
        self._dropped.start()
        self._on_dropped = self._dropped.add
        return self._on_dropped

    def _take(self, batch: list[InferenceRequest], returned: object) -> None:
        """Send what the model's `execute` has returned. Raises `InternalError` for what it must not return."""
        if self._instance.decoupled:
            self._check_decoupled(returned)
        if returned is not None:
            self._respond(batch, returned)
        else:  # the model uses response senders
            for open_request in batch:
                open_request.leave_open()

    @property
    def checks_health(self) -> bool:
        return hasattr(self._model, "is_ready")

    def check_health(self, done: Callable[[str], None]) -> None:
        check_health(self._model, self._instance.name, self._event_loop, done)

    def finalize(self) -> None:
        """Call the model's `finalize`, and end the event loop. Errors are only logged."""
        if self._dropped is not None:
            self._instance.may_call = False
        if hasattr(self._model, "finalize"):
            try:
                with model_code(f"finalize of model '{self._instance.name}' failed: "):
                    self._model.finalize()
            except ServingError as error:
                self.host.log("ERROR", error.message)
        if self._loop is not None:
            self._loop.stop()
        if self._dropped is not None:
            self._dropped.stop()
        if self._modules is not None:  # the process goes on without this model
            forget_instance(self._current)

    def _import_model_class(self, arguments: ModelArguments) -> type[Any]:
        """Return the model's class. The file is imported only once for `complete` and `load`."""
        if self._model_class is None:
            triton_python_backend_utils.install()
            if "terminal" in arguments.backend_config:
                from backends.python.author_terminal import use_terminal  # for `naiad dev` alone

                use_terminal(arguments.backend_config["terminal"], arguments.model_dir)
            sys.argv = [""]  # as in Triton: a model that parses arguments, as `unittest.main` does, finds none
            self._modules = ModelModules(arguments.model_dir, arguments.version_dir)
            self._modules.claim_names()
            self._current = PythonInstance(arguments, self.host)
            set_current_instance(self._current)
            self._model_class = import_model_class(arguments)
        return self._model_class

    def _check_batch_size(self, requests: Sequence[WorkerRequest]) -> None:
        """Refuse too many rows or requests. Schedulers do not send such a batch, but a warm-up may."""
        limit = self._instance.max_batch_size
        size = len(requests)
        if limit > 0:
            size = 0
            for request in requests:
                if request.inputs:
                    size += request.inputs[0].shape[0]
        if size > 1 and size > limit:
            raise InternalError(f"batch size {size} for '{self._instance.name}', max allowed is {limit}")

    def _call(self, batch: list[InferenceRequest]) -> object:
        """Call the model's `execute` and return its result; None for a decoupled `async def`, which keeps running."""
        execute = getattr(self._model, "execute", None)
        if execute is None:
            raise self._failure(f"Python model {self._model_path} does not implement `execute` method.")
        try:
            returned = execute(list(batch))
        except ServingError:
            raise
        except BaseException as error:  # not in `model_code`: entering the context would take longer than the call
            raise model_failure(error, self._instance.failure_prefix) from error
        if not isinstance(returned, types.CoroutineType):
            return returned
        loop = self._event_loop()
        if not self._instance.decoupled:
            return self.host.calls.wait_for(loop.submit(self._await(returned, batch)))
        loop.start_task(self._await_decoupled(returned, batch))
        return None

    def _event_loop(self) -> EventLoop:
        """Return the event loop, which runs from the first call until the end of the worker."""
        if self._loop is None:
            self._loop = EventLoop()
            self._loop.start()
        return self._loop

    async def _await(self, coroutine: Coroutine[Any, Any, object], batch: list[InferenceRequest]) -> object:
        self._note_executed(batch)
        with model_code(self._instance.failure_prefix):
            return await coroutine

    def _note_executed(self, batch: list[InferenceRequest]) -> None:
        """Let calls of other models know what they are made for. Each of the coroutines is a task, with a context."""
        blocking = not self._instance.decoupled and self._concurrency == 1
        executed.set(ExecutedRequests([request.worker_request for request in batch], blocking=blocking))

    async def _await_paced(self, coroutine: Coroutine[Any, Any, object], batch: list[InferenceRequest]) -> object:
        """Wait for the `execute` of a decoupled model, which pauses while it is too far ahead of its clients."""
        loop_thread = self._event_loop().thread_id
        requests = [request.responding_in(loop_thread) for request in batch]
        self._note_executed(batch)
        with model_code(self._instance.failure_prefix):
            return await Paced(coroutine, requests)

    async def _await_decoupled(self, coroutine: Coroutine[Any, Any, object], batch: list[InferenceRequest]) -> None:
        """Wait for the `execute` of a decoupled model. An error ends the requests that are still open."""
        try:
            self._check_decoupled(await self._await_paced(coroutine, batch))
        except (KernelGone, ConnectionError):
            pass  # the worker ends
        except BaseException as error:
            failure = self._failed(error)
            for request in batch:
                request.fail(failure)

    async def _overlap(
        self, batch: list[InferenceRequest], timings: Timings, ended: Callable[[ServingError | None], None]
    ) -> None:
        """Execute a batch beside others. Nothing refers to its inputs when `ended` is called."""
        failure: ServingError | None = None
        try:
            try:
                await self._execute_overlapping(batch, timings)
            except (KernelGone, ConnectionError):
                raise
            except BaseException as error:  # also when the worker is stopped, and for what tasks of the model raise
                failure = self._failed(error)
                for request in batch:
                    request.close()
                    del request
            batch.clear()
            ended(failure)
        except (KernelGone, ConnectionError):
            pass  # the worker ends

    async def _execute_overlapping(self, batch: list[InferenceRequest], timings: Timings) -> None:
        with model_code(self._instance.failure_prefix):
            coroutine = self._model.execute(list(batch))
        try:
            if self._instance.decoupled:
                returned = await self._await_paced(coroutine, batch)
            else:
                returned = await self._await(coroutine, batch)
        finally:
            timings.inferred_ns = timings.clock()
        self._take(batch, returned)

    def _failed(self, error: BaseException) -> ServingError:
        """Log and return the error that the requests of a batch get."""
        if not isinstance(error, ServingError):
            error = self._failure(describe(error))
        self.host.log("ERROR", error.message)
        return without_tracebacks(error)

    def _check_decoupled(self, returned: object) -> None:
        if returned is not None:
            raise self._failure(
                f"Python model '{self._instance.name}' is using the decoupled mode and the execute function "
                "must return None."
            )

    def _respond(self, batch: list[InferenceRequest], returned: object) -> None:
        """Send the returned responses. None instead of a response means that the model uses the request's sender."""
        if not isinstance(returned, list) or len(returned) != len(batch):
            raise self._failure(wrong_return(returned, len(batch)))
        for index, response in enumerate(returned):
            if response is None:
                continue
            if not isinstance(response, InferenceResponse):
                raise self._failure(
                    "Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response)}'."
                )
            if batch[index].reschedules:
                raise self._failure(
                    "Expected a None object in the execute function return list for reschduled request, found type "
                    f"'{type(response)}'."
                )
        for index, request in enumerate(batch):
            response = returned[index]
            if response is None:
                request.leave_open()
            elif not request.send_returned(response):
                self.host.log(
                    "WARNING",
                    f"model '{self._instance.name}' returned a response for a request whose response sender had "
                    "already sent the final response; the returned response is dropped",
                )

    def _failure(self, reason: str) -> InternalError:
        return InternalError(self._instance.failure_prefix + reason)


def _concurrency(arguments: ModelArguments, model: object) -> int:
    """Return how many batches the model executes at the same time. Raises `BadConfig` if it cannot do so."""
    concurrency = int(arguments.parameter(CONCURRENCY) or 1)
    if concurrency > 1 and not inspect.iscoroutinefunction(getattr(model, "execute", None)):
        raise BadConfig(
            f"model '{arguments.model_name}' has {concurrency} as parameter '{CONCURRENCY}', which is for models with "
            "`async def execute`; its `execute` is not an `async def`. Use more instances (instance_group.count)"
        )
    return concurrency


def _initialize_arguments(arguments: ModelArguments) -> dict[str, str]:
    """Return the argument of the model's `initialize`. All values are strings."""
    return {
        "model_config": json.dumps(arguments.config, separators=(",", ":"), ensure_ascii=False),
        "model_instance_kind": arguments.kind,
        "model_instance_name": arguments.instance_name,
        "model_instance_device_id": str(arguments.device_id),
        "model_repository": str(arguments.model_dir),
        "model_version": str(arguments.version),
        "model_name": arguments.model_name,
    }


def check_health(model: Any, instance_name: str, loop: Callable[[], EventLoop], done: Callable[[str], None]) -> None:
    """Call the model's `is_ready`, and `done` with the reason why it is not ready, or with an empty text.

    An `async def is_ready` runs on `loop()`; then `done` is called from there.
    """
    try:
        returned = model.is_ready()
    except BaseException as error:
        done(_failed(instance_name, error))
        return
    if isinstance(returned, types.CoroutineType):
        loop().start_task(_await(returned, instance_name, done))
    else:
        done(_problem(instance_name, returned))


async def _await(coroutine: Coroutine[Any, Any, object], instance_name: str, done: Callable[[str], None]) -> None:
    try:
        problem = _problem(instance_name, await coroutine)
    except BaseException as error:  # also a task of the model that was cancelled
        problem = _failed(instance_name, error)
    done(problem)


def _problem(instance_name: str, returned: object) -> str:
    if not isinstance(returned, bool):
        return f"Model '{instance_name}' is not ready: is_ready() must return a boolean value, found {type(returned)}."
    return "" if returned else f"Model '{instance_name}' is not ready (user-defined check failed)."


def _failed(instance_name: str, error: BaseException) -> str:
    return f"Model '{instance_name}' is not ready: is_ready() failed: {describe(error)}"


class PythonBasedBackend(PythonBackend):
    """Runs a model with the `TritonPythonModel` of its backend. `python_based` makes a subclass for each file."""

    #: The backend's `model.py`.
    file: ClassVar[Path]
    #: All models of a process would have its modules.
    shares_worker = False

    def _import_model_class(self, arguments: ModelArguments) -> type[Any]:
        folder = str(self.file.parent)
        if folder not in sys.path:  # the backend's own modules
            sys.path.append(folder)
        if self.file.parent.name == "vllm":
            add_former_names()
        return super()._import_model_class(msgspec.structs.replace(arguments, code_file=self.file))


def python_based(file: Path) -> type[PythonBasedBackend]:
    """Return the backend class for a `model.py` in the backend directory."""
    return type("PythonBasedBackend", (PythonBasedBackend,), {"file": file, "__module__": __name__})
