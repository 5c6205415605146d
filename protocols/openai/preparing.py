"""Bodies of requests as inputs of the model: small ones on the event loop, others by a helper.

The functions that run in a helper are here too. They return errors in the result: helpers would lose what a client
reads of them beside the message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.config.spec import ModelSpec  # noqa: TC001 - msgspec reads it
from kernel.errors import InternalError
from kernel.serving.helper_tasks import TaskResult
from protocols.large_requests import LOOP_BYTE_SIZE, AwaitedTask, aligned, joined, tensor_with_own_lease
from protocols.openai.dialects import required_dialect, required_embedding_dialect
from protocols.openai.errors import ApiError, unknown_model
from protocols.openai.plans import Api, Document, GenerationPlan, make_embedding_plan, make_plan, read_document
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.serving.helper_tasks import TaskSteps
    from kernel.serving.interface import KernelInterface
    from kernel.serving.route import ModelRoute
    from protocols.http.bodies import BodyCollector
    from shm.arena import Block

#: The names of the functions.
FIND_MODEL, PREPARE = "openai.find_model", "openai.prepare"


class Prepared(msgspec.Struct, array_like=True):
    """A body, decoded: the plan, and the inputs of each request to the model."""

    plan: GenerationPlan
    route: ModelRoute
    #: Each list owns the leases of its tensors.
    inputs: list[list[Tensor]]


class PrepareArguments(msgspec.Struct, array_like=True):
    """What is known before a body is decoded."""

    api: Api
    spec: ModelSpec
    default_max_tokens: int | None


class _Found(msgspec.Struct, array_like=True):
    """What a helper has found out: an error, or the rest."""

    error: tuple[str, int, str | None, str | None, str] | None = None
    model: str = ""
    plan: GenerationPlan | None = None
    #: Of each request to the model: name, datatype, shape and size of its inputs.
    tensors: list[list[tuple[str, str, list[int], int]]] = []

    @property
    def byte_size(self) -> int:
        """The bytes of memory for all inputs."""
        return sum(aligned(each[3]) for described in self.tensors for each in described)

    def check(self) -> None:
        """Raise `ApiError` if there is one."""
        if self.error is not None:
            message, status, param, code, kind = self.error
            raise ApiError(message, status, param=param, code=code, kind=kind)


_encoder = msgspec.msgpack.Encoder()
_found_decoder = msgspec.msgpack.Decoder(_Found)
_arguments_decoder = msgspec.msgpack.Decoder(PrepareArguments)
_api_decoder = msgspec.msgpack.Decoder(Api)


async def prepare(
    kernel: KernelInterface,
    api: Api,
    body: BodyCollector,
    default_max_tokens: int | None,
    check_model: Callable[[str], None],
    peer: str,
) -> Prepared:
    """Return what is in a body. Raises `ServingError`, and what `check_model` raises for the model's name.

    A large body is decoded by a helper twice: its model is not known before, and decides what is right.
    """
    if body.byte_size <= LOOP_BYTE_SIZE:
        document = read_document(body.body(), api)
        check_model(document.model)
        route = route_of(kernel, document.model)
        plan, inputs = _planned(document, route.spec, default_max_tokens)
        return Prepared(plan, route, inputs)
    sources = body.sources()
    try:
        task = AwaitedTask(
            kernel, FIND_MODEL, _encoder.encode(api), [tensor_with_own_lease(each) for each in sources], peer=peer
        )
        message, _ = await task.run()
        found = _found_decoder.decode(message)
        found.check()
        check_model(found.model)
        route = route_of(kernel, found.model)
        return await _prepared(kernel, PrepareArguments(api, route.spec, default_max_tokens), route, sources, peer)
    finally:
        for source in sources:
            source.release()


async def _prepared(
    kernel: KernelInterface, arguments: PrepareArguments, route: ModelRoute, sources: Sequence[Tensor], peer: str
) -> Prepared:
    """Have a helper decode a body into memory of its model. Raises `ServingError`."""
    found = _Found()

    def memory(message: bytes) -> Block:
        nonlocal found
        found = _found_decoder.decode(message)
        return kernel.memory_for(route, found.byte_size)

    task = AwaitedTask(
        kernel, PREPARE, _encoder.encode(arguments), [tensor_with_own_lease(each) for each in sources], memory, peer
    )
    message, _ = await task.run()
    block = task.memory
    if block is None:
        _found_decoder.decode(message).check()
        raise InternalError("a helper has decoded a request without memory for it")
    assert found.plan is not None, "a helper has found no plan"
    inputs: list[list[Tensor]] = []
    position = block.offset
    for described in found.tensors:
        tensors: list[Tensor] = []
        inputs.append(tensors)
        for name, datatype, shape, byte_size in described:
            span = Span(block.lease.share(), position, byte_size)
            tensors.append(Tensor(name, datatype, shape, None, span))
            position += aligned(byte_size)
    block.release()
    return Prepared(found.plan, route, inputs)


def _planned(
    document: Document, spec: ModelSpec, default_max_tokens: int | None
) -> tuple[GenerationPlan, list[list[Tensor]]]:
    """Return the plan for a body, and the inputs of each request to the model. Raises `ApiError`."""
    if document.api is Api.EMBEDDINGS:
        return make_embedding_plan(document, required_embedding_dialect(spec))
    return make_plan(document, required_dialect(spec), default_max_tokens)


def route_of(kernel: KernelInterface, name: str) -> ModelRoute:
    """Return the route to a model. Raises `ServingError`: with Triton's text for one that does not exist."""
    if name not in kernel.catalog.ready_names():
        raise unknown_model(name)
    return kernel.route(name)


# ---- in a helper --------------------------------------------------------------------------------


def find_model_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Return which model a body is for."""
    try:
        found = _Found(model=read_document(joined(sources), _api_decoder.decode(arguments)).model)
    except ApiError as error:
        found = _failed(error)
    return TaskResult(_encoder.encode(found))
    yield b""  # never: it makes a generator, as every task function is


def prepare_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Decode a body, and write the inputs of each request to the model."""
    known = _arguments_decoder.decode(arguments)
    try:
        document = read_document(joined(sources), known.api)
        plan, inputs = _planned(document, known.spec, known.default_max_tokens)
    except ApiError as error:
        return TaskResult(_encoder.encode(_failed(error)))
    described = [[(each.name, each.datatype, each.shape, each.byte_size) for each in tensors] for tensors in inputs]
    memory = yield _encoder.encode(_Found(plan=plan, tensors=described))
    position = 0
    for tensor in (each for tensors in inputs for each in tensors):
        memory[position : position + tensor.byte_size] = tensor.raw()
        position += aligned(tensor.byte_size)
    return TaskResult(b"")


def _failed(error: ApiError) -> _Found:
    return _Found((error.text, error.status, error.param, error.code_text, error.kind))
