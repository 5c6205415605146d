"""Warm-up: requests that every instance executes before its model is READY.

`warmup_samples` reads model_warmup of the configuration; a sample creates the requests of each run. Error
texts are Triton's (backend_model_instance.cc). `warm_up` runs them on new instances, before these take requests:
warm-up requests bypass the scheduler, which could join them or send all of them to one instance.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.config.generated.model_config_pb2 import DataType
from kernel.errors import InternalError, InvalidArgument, request_prefix
from kernel.file_threads import in_file_thread
from kernel.serving.batch import Batch
from kernel.serving.request import NO_SINK, ClientlessSink, Request
from kernel.serving.validation import validate
from shm.datatypes import BY_CONFIG_NAME, element_count
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernel.config.generated.model_config_pb2 import ModelConfig, ModelWarmup
    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.repository.source import ModelSource
    from kernel.serving.instance import Instance
    from kernel.serving.model import Model
    from kernel.serving.response import Response, Sink

WARMUP_FOLDER = "warmup"

#: A zero or random string element is an empty string, as in Triton: only its length, in four zero bytes.
_STRING_LENGTH_BYTE_SIZE = 4

#: Limits of the bytes and requests of one run: they go to the worker in one message.
MAX_BYTE_SIZE = 256 << 20

MAX_REQUESTS = 1 << 16


class Random(Protocol):
    """A source of random bytes, such as `random.Random`."""

    def randbytes(self, n: int) -> bytes: ...


class WarmupSample(msgspec.Struct, frozen=True):
    """One entry of model_warmup: `batch_size` equal requests, executed together, `count` times."""

    name: str
    batch_size: int
    count: int
    inputs: tuple[Tensor, ...]

    def request(self, model_name: str, sink: Sink) -> Request:
        """Return a new request of this sample, with one row. Requests share the bytes of the tensors."""
        return Request(model_name, [msgspec.structs.replace(tensor) for tensor in self.inputs], sink, streaming=True)

    def failed(self, errors: list[str]) -> InvalidArgument:
        """Return the error of a load if the responses of its warm-up had `errors`."""
        return InvalidArgument(
            f"failed to run warmup sample '{self.name}': " + "".join(f"{error}; " for error in errors)
        )


def warmup_files(config: ModelConfig) -> list[str]:
    """Return the names of the files in the model's folder `warmup` that the warm-up needs."""
    names = {
        given.input_data_file
        for sample in config.model_warmup
        if sample.batch_size
        for given in sample.inputs.values()
        if given.WhichOneof("input_data_type") == "input_data_file"
    }
    return sorted(names)


def warmup_samples(
    config: ModelConfig, spec: ModelSpec, files: Mapping[str, bytes], random: Random
) -> list[WarmupSample]:
    """Return the samples of a checked configuration; `files` maps each name of `warmup_files` to its content.

    Raises `InvalidArgument` if a sample does not match the model's inputs or is too large.
    """
    samples = []
    for setting in config.model_warmup:
        if not setting.batch_size:
            continue
        for name, given in sorted(setting.inputs.items()):
            _check_dims(name, given)
        inputs = [_input(name, given, spec, files, random) for name, given in sorted(setting.inputs.items())]
        total = sum(tensor.byte_size for tensor in inputs) * setting.batch_size
        if total > MAX_BYTE_SIZE or setting.batch_size > MAX_REQUESTS:
            raise InvalidArgument(
                f"warmup sample '{setting.name}' has {setting.batch_size} requests with {total} bytes, at most "
                f"{MAX_REQUESTS} requests and {MAX_BYTE_SIZE} bytes are allowed"
            )
        _check(setting.name, inputs, spec)
        samples.append(WarmupSample(setting.name, setting.batch_size, max(setting.count, 1), tuple(inputs)))
    return samples


def _check(sample: str, inputs: list[Tensor], spec: ModelSpec) -> None:
    """Check the request of a sample. As in Triton, inputs that the configuration does not declare are not checked: they
    may be controls. But one may be a misspelt name. Raises `InvalidArgument`."""
    known = [tensor for tensor in inputs if tensor.name in spec.inputs]
    try:
        validate(Request(spec.name, known, NO_SINK), spec)
    except InvalidArgument as error:
        where = f"in warmup sample '{sample}'"
        unknown = ", ".join(f"'{tensor.name}'" for tensor in inputs if tensor.name not in spec.inputs)
        if unknown:
            names = ", ".join(f"'{name}'" for name in spec.inputs)
            where += f", which has {unknown}; the inputs of the model are {names}"
        raise InvalidArgument(f"{error.message} ({where})") from error


def _check_dims(name: str, given: ModelWarmup.Input) -> None:
    if any(dim < 0 for dim in given.dims):
        raise InvalidArgument(f"warmup setting expects all variable-size dimensions are specified for input '{name}'")


def _input(name: str, given: ModelWarmup.Input, spec: ModelSpec, files: Mapping[str, bytes], random: Random) -> Tensor:
    """Return one input of a warm-up request, with one row."""
    datatype = BY_CONFIG_NAME.get(DataType.Name(given.data_type)) if given.data_type in DataType.values() else None
    element_byte_size = datatype.byte_size if datatype is not None else 0
    is_string = element_byte_size == 0
    byte_size = element_count(given.dims) * (element_byte_size or _STRING_LENGTH_BYTE_SIZE)
    match given.WhichOneof("input_data_type"):
        case "input_data_file":
            data = _file_data(given.input_data_file, files, None if is_string else byte_size)
        case "random_data" if not is_string:
            _check_byte_size(name, byte_size)
            data = random.randbytes(byte_size)
        case "random_data" | "zero_data":
            _check_byte_size(name, byte_size)
            data = bytes(byte_size)
        case _:
            raise InvalidArgument(
                f"{request_prefix('')}warmup setting expects input '{name}' to have input_data_type set"
            )
    if datatype is not None and datatype.name == "BOOL":
        data = bytes(byte & 1 for byte in data)
    rows = [1] if spec.max_batch_size > 0 else []
    return Tensor(name, datatype.name if datatype is not None else "<invalid>", [*rows, *given.dims], data)


def _check_byte_size(name: str, byte_size: int) -> None:
    if byte_size > MAX_BYTE_SIZE:
        raise InvalidArgument(f"warmup input '{name}' has {byte_size} bytes, at most {MAX_BYTE_SIZE} are allowed")


def _file_data(name: str, files: Mapping[str, bytes], byte_size: int | None) -> bytes:
    """Return the first `byte_size` bytes of a file, or all bytes for None."""
    data = files[name]
    if byte_size is None:
        return data
    if byte_size > len(data):
        raise InvalidArgument(
            # The missing space after the file's name is Triton's.
            f"{request_prefix('')}warmup setting expects {byte_size} bytes, but the data provided from {name}only "
            f"has {len(data)} bytes"
        )
    return data[:byte_size]


async def warm_up(
    model: Model, instances: Sequence[Instance], source: ModelSource, clock: Clock, limit_s: float = 0
) -> None:
    """Let each of `instances` execute all samples; the scheduler must not use the instances yet.

    Raises `ServingError`, also when all of it takes longer than `limit_s` seconds (0 for no limit). The
    instances then still execute what they were sent.
    """
    if not model.config.model_warmup or not instances:
        return
    files = await in_file_thread(source.read_warmup_files, model.config)
    samples = warmup_samples(model.config, model.spec, files, random.Random())
    try:
        async with asyncio.timeout(limit_s or None):
            for sample in samples:
                for _ in range(sample.count):
                    await _run(model, instances, sample, clock)
    except TimeoutError:
        raise InternalError(f"the model's warm-up took longer than {limit_s:g} s") from None


async def _run(model: Model, instances: Sequence[Instance], sample: WarmupSample, clock: Clock) -> None:
    """Let all instances execute `sample` once, at the same time. Raises `ServingError`."""
    responses = _WarmupResponses()
    now_ns = clock.now_ns()
    batches = [Batch([*responses.requests(model, sample, instance, now_ns)]) for instance in instances]
    for instance, batch in zip(instances, batches, strict=True):
        model.instances.dispatch_apart(instance, batch)
    await responses.all_final()
    if responses.errors:
        raise sample.failed(responses.errors)


class _WarmupResponses:
    """Collects the errors of warm-up responses, and waits for all final responses."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._unfinished_count = 0
        self._done = asyncio.get_running_loop().create_future()

    def requests(self, model: Model, sample: WarmupSample, instance: Instance, now_ns: int) -> list[Request]:
        """Return the requests of one batch for `instance`. Their responses go to `received`."""
        made = []
        for _ in range(sample.batch_size):
            sink = _WarmupSink(self, instance)
            sink.request = sample.request(model.name, sink)
            sink.request.owner = sink
            sink.request.received_ns = sink.request.queue_start_ns = now_ns
            made.append(sink.request)
        self._unfinished_count += len(made)
        return made

    def received(self, response: Response) -> None:
        if response.error is not None:
            self.errors.append(response.error.message)
        if response.final:
            self._unfinished_count -= 1
            if not self._unfinished_count and not self._done.done():
                self._done.set_result(None)

    async def all_final(self) -> None:
        """Wait until each request has its final response."""
        await self._done


class _WarmupSink(ClientlessSink):
    """Sink and owner of a request. Consumes every response immediately, so that a decoupled model can send the next."""

    def __init__(self, responses: _WarmupResponses, instance: Instance) -> None:
        self._responses = responses
        self._instance = instance
        self.request: Request | None = None

    def send(self, response: Response) -> None:
        response.release()
        if self.request is not None:
            self.request.failed = self.request.failed or response.error is not None
            self.request.consumed()
        self._responses.received(response)

    # ---- kernel.serving.request.RequestOwner -------------------------------------------------

    def responded(self, request: Request, response: Response) -> None:
        """Do nothing: statistics do not count the warm-up."""

    def consumed(self, request: Request, count: int) -> None:
        self._instance.consumed(request, count)

    def cancelled(self, request: Request) -> None:
        self._instance.cancel(request)
