"""Bodies of requests as inputs of the model: small ones on the event loop, others by a helper.

The functions that run in a helper are here too. They return errors in the result: helpers would lose what a client
reads of them beside the message.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.config.spec import ModelSpec  # noqa: TC001 - msgspec reads it
from kernel.errors import InternalError, NoDescriptorLeft, NoMemory, Unavailable
from kernel.serving.helper_tasks import TaskResult
from protocols.large_requests import LOOP_BYTE_SIZE, AwaitedTask, aligned, joined, tensor_with_own_lease
from protocols.openai.dialects import required_dialect, required_embedding_dialect
from protocols.openai.errors import ApiError, unknown_model
from protocols.openai.plans import Api, Document, GenerationPlan, make_embedding_plan, make_plan, read_document
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from kernel.serving.helper_tasks import TaskSteps
    from kernel.serving.interface import KernelInterface
    from kernel.serving.route import ModelRoute
    from protocols.http.bodies import BodyCollector
    from shm.arena import Block

#: The names of the functions.
FIND_MODEL, PREPARE = "openai.find_model", "openai.prepare"

#: Of a text helper (`protocols.openai.text_tasks`).
PREPARE_TEXT = "openai.prepare_text"


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


class Found(msgspec.Struct, array_like=True):
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
found_decoder = msgspec.msgpack.Decoder(Found)
arguments_decoder = msgspec.msgpack.Decoder(PrepareArguments)
_api_decoder = msgspec.msgpack.Decoder(Api)


async def prepare(
    kernel: KernelInterface,
    api: Api,
    body: BodyCollector,
    default_max_tokens: int | None,
    check_model: Callable[[str], None],
    peer: str,
    texts: TextTasks,
) -> Prepared:
    """Return what is in a body. Raises `ServingError`, and what `check_model` raises for the model's name.

    A large body is decoded by a helper twice: its model is not known before, and decides what is right. A chat whose
    messages become a prompt here is decoded by a text helper.
    """
    async with body_of(kernel, api, body, check_model, peer) as (route, document, sources):
        arguments = PrepareArguments(api, route.spec, default_max_tokens)
        if needs_texts(api, route.spec):
            return await _prepared(kernel, arguments, route, sources, texts)
        if document is not None:
            plan, inputs = _planned(document, route.spec, default_max_tokens)
            return Prepared(plan, route, inputs)
        return await _prepared(kernel, arguments, route, sources, peer)


@contextlib.asynccontextmanager
async def body_of(
    kernel: KernelInterface, api: Api, body: BodyCollector, check_model: Callable[[str], None], peer: str
) -> AsyncGenerator[tuple[ModelRoute, Document | None, list[Tensor]], None]:
    """Find out which model a body is for. The value is its route, what is in a small body, and the body as sources of
    tasks, which are released at the end of the block. Raises as `prepare`."""
    document: Document | None = None
    if body.byte_size <= LOOP_BYTE_SIZE:
        document = read_document(body.body(), api)
        check_model(document.model)
        yield route_of(kernel, document.model), document, [Tensor("", "UINT8", [body.byte_size], body.body())]
        return
    sources = body.sources()
    try:
        task = AwaitedTask(
            kernel, FIND_MODEL, _encoder.encode(api), [tensor_with_own_lease(each) for each in sources], peer=peer
        )
        message, _ = await task.run()
        found = found_decoder.decode(message)
        found.check()
        check_model(found.model)
        yield route_of(kernel, found.model), None, sources
    finally:
        for source in sources:
            source.release()


#: For how many seconds the requests of a model are refused after its template or tokenizer has hung or ended a helper.
REST_S = 10.0

#: From more bytes of a request on, its size is the reason as likely as the model: then the model is not refused.
MAX_RESTING_BYTE_SIZE = 1 << 20


class TextTasks:
    """Has text helpers do what models bring: their chat templates and tokenizers.

    A model whose template has hung, or has ended the helper, is refused for some seconds: other models need helpers.
    """

    def __init__(self, kernel: KernelInterface, now_s: Callable[[], float]) -> None:
        """`now_s` returns monotonic seconds."""
        self._kernel = kernel
        self._now_s = now_s
        #: Model → until when it is refused.
        self._resting: dict[str, float] = {}

    async def run(
        self,
        model: str,
        name: str,
        arguments: bytes,
        sources: Sequence[Tensor],
        memory: Callable[[bytes], Block] | None = None,
    ) -> tuple[bytes, Tensor | None, Block | None]:
        """Run a task for `model`: return its message, its output and its memory, which the caller releases.

        `sources` stay the caller's. Raises `ServingError`.
        """
        now_s = self._now_s()
        if (until_s := self._resting.get(model)) is not None:
            if now_s < until_s:
                raise ApiError(
                    f"the chat template or the tokenizer of model '{model}' has failed; it is tried again in "
                    f"{until_s - now_s:.0f} s", 500, param="model",
                )  # fmt: skip
            del self._resting[model]
        task = AwaitedTask(
            self._kernel, name, arguments, [tensor_with_own_lease(each) for each in sources], memory, model,
            self._kernel.text_helpers,
        )  # fmt: skip
        try:
            message, output = await task.run()
        except (NoMemory, NoDescriptorLeft):
            raise  # of the server, which has little left: the model has done nothing wrong
        except Unavailable as error:
            if sum(each.byte_size for each in sources) <= MAX_RESTING_BYTE_SIZE:
                self._resting[model] = self._now_s() + REST_S
            raise ApiError(
                f"the chat template or the tokenizer of model '{model}' has failed: {error.text}", 500, param="model"
            ) from None
        return message, output, task.memory


async def _prepared(
    kernel: KernelInterface,
    arguments: PrepareArguments,
    route: ModelRoute,
    sources: Sequence[Tensor],
    by: str | TextTasks,
) -> Prepared:
    """Have a helper decode a body into memory of its model. Raises `ServingError`.

    `by` is the client whose task it is, or what has a text helper do it.
    """
    found = Found()

    def memory(message: bytes) -> Block:
        nonlocal found
        found = found_decoder.decode(message)
        return kernel.memory_for(route, found.byte_size)

    encoded = _encoder.encode(arguments)
    if isinstance(by, TextTasks):
        message, _, block = await by.run(route.spec.name, PREPARE_TEXT, encoded, sources, memory)
    else:
        task = AwaitedTask(kernel, PREPARE, encoded, [tensor_with_own_lease(each) for each in sources], memory, by)
        message, _ = await task.run()
        block = task.memory
    if block is None:
        found_decoder.decode(message).check()
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


class PromptTexts(Protocol):
    """What a text helper makes of texts, for one model."""

    def prompt(self, fields: dict[str, Any]) -> str:
        """Return the prompt for the fields of a chat. Raises `ApiError`."""

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text. Raises `ApiError`."""


def needs_texts(api: Api, spec: ModelSpec) -> bool:
    """Whether a text helper decodes the requests of this API to a model. Raises `ApiError` for a model without it."""
    if api is Api.EMBEDDINGS:
        return required_embedding_dialect(spec).tokenizes
    return api.is_chat and required_dialect(spec).renders


def _planned(
    document: Document,
    spec: ModelSpec,
    default_max_tokens: int | None,
    texts: PromptTexts | None = None,
) -> tuple[GenerationPlan, list[list[Tensor]]]:
    """Return the plan for a body, and the inputs of each request to the model. Raises `ApiError`."""
    if document.api is Api.EMBEDDINGS:
        return make_embedding_plan(document, required_embedding_dialect(spec), None if texts is None else texts.tokens)
    return make_plan(document, required_dialect(spec), default_max_tokens, None if texts is None else texts.prompt)


def route_of(kernel: KernelInterface, name: str) -> ModelRoute:
    """Return the route to a model. Raises `ServingError`: with Triton's text for one that does not exist."""
    if name not in kernel.catalog.ready_names():
        raise unknown_model(name)
    return kernel.route(name)


# ---- in a helper --------------------------------------------------------------------------------


def find_model_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Return which model a body is for."""
    try:
        found = Found(model=read_document(joined(sources), _api_decoder.decode(arguments)).model)
    except ApiError as error:
        found = failed(error)
    return TaskResult(_encoder.encode(found))
    yield b""  # never: it makes a generator, as every task function is


def prepare_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Decode a body, and write the inputs of each request to the model."""
    return (yield from prepare_steps(arguments_decoder.decode(arguments), sources))


def prepare_steps(
    known: PrepareArguments, sources: Sequence[memoryview], texts: PromptTexts | None = None
) -> TaskSteps:
    """Decode a body, and write the inputs of each request to the model. `texts` are those of the model."""
    try:
        document = read_document(joined(sources), known.api)
        plan, inputs = _planned(document, known.spec, known.default_max_tokens, texts)
    except ApiError as error:
        return TaskResult(_encoder.encode(failed(error)))
    described = [[(each.name, each.datatype, each.shape, each.byte_size) for each in tensors] for tensors in inputs]
    memory = yield _encoder.encode(Found(plan=plan, tensors=described))
    position = 0
    for tensor in (each for tensors in inputs for each in tensors):
        memory[position : position + tensor.byte_size] = tensor.raw()
        position += aligned(tensor.byte_size)
    return TaskResult(b"")


def failed(error: ApiError) -> Found:
    """Return what a helper says of an error."""
    return Found((error.text, error.status, error.param, error.code_text, error.kind))


def failure_message(error: ApiError | None) -> bytes:
    """Return what a helper says of an error, or of none."""
    return _encoder.encode(Found() if error is None else failed(error))


# ---- for other tasks --------------------------------------------------------------------------


def arguments_of(api: Api, spec: ModelSpec) -> bytes:
    """Return the arguments of a task that needs to know the API and the model."""
    return _encoder.encode(PrepareArguments(api, spec, None))


def found_in(message: bytes) -> Found:
    """Return what a helper has found out."""
    return found_decoder.decode(message)
