"""How models are spoken to: the requests of clients become inputs of a model, its outputs become text. Pure.

A model that generates has a `Dialect`, which `dialect_of` finds by what the model declares and not by the name of its
backend. All dialects have the same outputs (`protocols.openai.pieces`). They are

- `WholeRequest`, ours for Python models: the input `openai_request` is the whole request as JSON, after the checks. The
  model responds with `text_output`, any number of times if it is decoupled, or with `openai_response`: chunks and
  bodies that it has made itself. Beside text it may have the outputs `finish_reason`, `num_input_tokens` and
  `num_output_tokens`.
- `VllmDialect`, of NVIDIA's backend for vLLM: the prompt, and one JSON object with the parameters of sampling under the
  names of vLLM's `SamplingParams`. The backend has the same inputs for all its models.
- `InputEach`, of TensorRT-LLM's backend: an input for each field, in its newer API behind the prefix
  `sampling_param_`. A field whose input the model does not declare is refused. Only what the client has given is sent:
  the backend changes its way of sampling where `top_p` is there.

A model that makes vectors of texts has an `EmbeddingDialect`. Ours has the input `openai_request` with one input of the
client, and the output `embedding`; vLLM's has one JSON object, and the vector as JSON in the text; an encoder gets
token ids (`EncoderEmbeddings`).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.config.model_parameters import OPENAI_FIELDS, TOOL_PARSER, declared_fields
from kernel.config.spec import TensorSpec  # noqa: TC001 - msgspec reads it
from kernel.errors import InternalError
from protocols.openai.errors import ApiError
from protocols.openai.pieces import LOGPROBS_OUTPUT, READY_OUTPUT, TEXT_OUTPUT, only_text
from shm.datatypes import encode_strings
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kernel.config.spec import ModelSpec
    from kernel.serving.response import Response

#: The input with the prompt, in the dialects of models that take no messages.
TEXT_INPUT = "text_input"


class Dialect(Protocol):
    """How one model is spoken to."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def output(self) -> str:
        """The output with the text, or with chunks and bodies that the model has made itself."""

    @property
    def ready(self) -> bool:
        """Whether the model makes its responses itself. Then it gets one request for all choices."""

    @property
    def chats(self) -> bool:
        """Whether the model takes messages of a chat."""

    @property
    def renders(self) -> bool:
        """Whether messages become a prompt here, by the model's chat template."""

    @property
    def tool_parser(self) -> str:
        """The name of the parser that finds calls of tools in the model's text; empty for none."""

    @property
    def honoured(self) -> frozenset[str]:
        """The fields that reach the model, of those that are its matter, and parts of messages that it takes."""

    @property
    def reason(self) -> str:
        """Why it does not honour others, as the end of a sentence."""

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        """Return the inputs of a request with these checked fields. Raises `ApiError`."""


def dialect_of(spec: ModelSpec) -> Dialect | None:
    """Return how a model is spoken to; None for a model that this front door cannot serve."""
    return whole_request(spec) or vllm_dialect(spec) or input_each(spec)


def required_dialect(spec: ModelSpec) -> Dialect:
    """As `dialect_of`. Raises `ApiError` for a model without one."""
    found = dialect_of(spec)
    if found is None:
        raise ApiError(
            f"model '{spec.name}' does not generate text: its inputs and outputs are none of those that OpenAI's API "
            "needs (docs/openai.md)",
            param="model",
        )
    return found


def input_shape(spec: TensorSpec, count: int = 1) -> list[int]:
    """Return the shape of an input with `count` elements in its last dimension: one row, where the model batches."""
    return [*(1 for _ in spec.shape[:-1]), count]


def texts_tensor(spec: TensorSpec, texts: Sequence[str | bytes]) -> Tensor:
    """Return an input of BYTES with these elements."""
    return Tensor(spec.name, "BYTES", input_shape(spec, len(texts)), encode_strings(texts))


def switch_tensors(specs: Mapping[str, TensorSpec], names: Iterable[str], *, on: bool = True) -> list[Tensor]:
    """Return the inputs of BOOL with these names, of which the model may have some."""
    return [Tensor(specs[name].name, "BOOL", input_shape(specs[name]), bytes([on])) for name in names if name in specs]


# ---- our dialect, for Python models ----------------------------------------------------------


REQUEST_INPUT = "openai_request"

#: Fields about how text is sampled: every model of this dialect gets them.
SAMPLING_FIELDS = frozenset(("frequency_penalty", "presence_penalty", "seed", "temperature", "top_p"))

#: Fields of tools, of models whose calls the server finds in their text.
_TOOL_FIELDS = frozenset(("parallel_tool_calls", "tool_choice", "tools"))

#: What can be in a response only if the model makes it itself.
_ONLY_READY = frozenset(
    ("audio", "function_call", "functions", "logprobs", "modalities", "parallel_tool_calls", "tool_choice", "tools",
     "top_logprobs")
)  # fmt: skip

_encoder = msgspec.json.Encoder()


class WholeRequest(msgspec.Struct, frozen=True):
    """A `Dialect`."""

    model: str
    ready: bool
    honoured: frozenset[str]
    request: TensorSpec
    chats: bool = True
    renders: bool = False
    tool_parser: str = ""
    reason: str = "does not say that it honours it (naiad.openai_fields)"

    @property
    def output(self) -> str:
        return READY_OUTPUT if self.ready else TEXT_OUTPUT

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        return [texts_tensor(self.request, [_encoder.encode(fields)])]


def whole_request(spec: ModelSpec) -> WholeRequest | None:
    """Return the dialect of a model; None if it has another one, or none."""
    if REQUEST_INPUT not in spec.inputs or spec.required_inputs not in ((), (REQUEST_INPUT,)):
        return None
    ready, text = spec.outputs.get(READY_OUTPUT), spec.outputs.get(TEXT_OUTPUT)
    output = ready or text
    if output is None or output.datatype != "BYTES" or spec.inputs[REQUEST_INPUT].datatype != "BYTES":
        return None
    declared = declared_fields(spec.parameters.get(OPENAI_FIELDS, ""), spec.name)
    honoured = SAMPLING_FIELDS | (declared if ready is not None else declared - _ONLY_READY)
    parser = "" if ready is not None else spec.parameters.get(TOOL_PARSER, "")
    if parser:
        honoured |= _TOOL_FIELDS
    return WholeRequest(spec.name, ready is not None, honoured, spec.inputs[REQUEST_INPUT], tool_parser=parser)


#: Fields of a chat that reach any model with a chat template.
_RENDERED = _TOOL_FIELDS | frozenset(
    ("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "documents", "reasoning_effort")
)


# ---- vLLM's backend --------------------------------------------------------------------------


PARAMETERS_INPUT = "sampling_parameters"

#: The input with images in base64.
_IMAGES = "image"

#: Fields that vLLM has by the same name.
_SAMPLING = (
    "allowed_token_ids", "bad_words", "frequency_penalty", "ignore_eos", "logit_bias", "max_tokens", "min_p",
    "min_tokens", "presence_penalty", "repetition_penalty", "seed", "skip_special_tokens", "stop", "stop_token_ids",
    "temperature", "top_k", "top_p",
)  # fmt: skip

#: vLLM's way to make a text that fits: of `response_format` and of its own field.
_STRUCTURED = "structured_outputs"

#: What responses are to have, where the model has the switch for it.
_SWITCHES = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")

_LOGPROBS_SWITCH = "return_logprobs"


class VllmDialect(msgspec.Struct, frozen=True):
    """A `Dialect`."""

    model: str
    specs: dict[str, TensorSpec]
    renders: bool = False
    honoured: frozenset[str] = frozenset((*_SAMPLING, _STRUCTURED, "response_format"))
    tool_parser: str = ""
    output: str = TEXT_OUTPUT
    ready: bool = False
    reason: str = "is one of vLLM's backend, which does not take it"

    @property
    def chats(self) -> bool:
        return self.renders

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        specs = self.specs
        parameters = {name: fields[name] for name in _SAMPLING if name in fields}
        structured = fields.get(_STRUCTURED) or _structured_outputs(fields.get("response_format"))
        if structured:  # the backend decodes it by itself
            parameters[_STRUCTURED] = _encoder.encode(structured).decode()
        switches, stream = ["exclude_input_in_output", *_SWITCHES], fields.get("stream", False)
        if asked := fields.get("logprobs"):
            parameters["logprobs"] = fields.get("top_logprobs", 0) if asked is True else asked
            # One response for each token: those of a whole text are long, and are decoded in one piece.
            switches, stream = [*switches, _LOGPROBS_SWITCH], True
        return [
            texts_tensor(specs[TEXT_INPUT], [fields["prompt"]]),
            texts_tensor(specs[PARAMETERS_INPUT], [_encoder.encode(parameters)]),
            *([texts_tensor(specs[_IMAGES], fields["images"])] if "images" in fields else ()),
            *switch_tensors(specs, ["stream"], on=stream),
            *switch_tensors(specs, switches),  # the server repeats the prompt for `echo`
        ]


def _structured_outputs(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what vLLM calls the form of a text that a client asks for."""
    if form is None:
        return None
    if form["type"] == "json_object":
        return {"json_object": True}
    return {"json": form["json_schema"].get("schema", {})}


def vllm_dialect(spec: ModelSpec) -> VllmDialect | None:
    """Return the dialect of a model; None if it has another one, or none."""
    if TEXT_INPUT not in spec.inputs or PARAMETERS_INPUT not in spec.inputs or TEXT_OUTPUT not in spec.outputs:
        return None
    if set(spec.required_inputs) - {TEXT_INPUT, PARAMETERS_INPUT}:
        return None
    honoured = frozenset((*_SAMPLING, _STRUCTURED, "response_format", *(_RENDERED if spec.tokenizer_folder else ())))
    if _IMAGES in spec.inputs and spec.tokenizer_folder:
        honoured |= {"image_url"}
    if _LOGPROBS_SWITCH in spec.inputs and LOGPROBS_OUTPUT in spec.outputs:
        honoured |= {"logprobs", "top_logprobs"}
    return VllmDialect(
        spec.name, spec.inputs, bool(spec.tokenizer_folder), honoured, spec.parameters.get(TOOL_PARSER, "")
    )


# ---- TensorRT-LLM's backend ------------------------------------------------------------------


#: The prefix of the newer API.
PREFIX = "sampling_param_"

#: Field → its input, without the prefix.
_NUMBERS = {
    name: name
    for name in (
        "frequency_penalty", "max_tokens", "min_p", "min_tokens", "presence_penalty", "repetition_penalty", "seed",
        "temperature", "top_k", "top_p",
    )
}  # fmt: skip

_STREAM = ("stream", "streaming")

_EXCLUDE = ("exclude_input_in_output", "exclude_input_from_output")

_STOP = "stop_words"

#: How a text is made to fit: the kind of the form, and a schema.
_GUIDE_TYPE, _GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"

_FORMATS = {
    "FP32": "<f", "FP64": "<d", "INT8": "<b", "INT16": "<h", "INT32": "<i", "INT64": "<q", "UINT8": "<B",
    "UINT16": "<H", "UINT32": "<I", "UINT64": "<Q",
}  # fmt: skip


class InputEach(msgspec.Struct, frozen=True):
    """A `Dialect`."""

    model: str
    #: Names without the prefix.
    specs: dict[str, TensorSpec]
    honoured: frozenset[str]
    renders: bool = False
    output: str = TEXT_OUTPUT
    ready: bool = False
    tool_parser: str = ""
    reason: str = "has no input for it"

    @property
    def chats(self) -> bool:
        return self.renders

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        specs = self.specs
        tensors = [texts_tensor(specs[TEXT_INPUT], [fields["prompt"]])]
        tensors += [
            _number(specs[name], fields[field], field)
            for field, name in _NUMBERS.items()
            if field in fields and name in specs
        ]
        if _STOP in specs and "stop" in fields:
            tensors.append(texts_tensor(specs[_STOP], fields["stop"]))
        if form := fields.get("response_format"):
            with_schema = form["type"] == "json_schema"
            tensors.append(texts_tensor(specs[_GUIDE_TYPE], ["json_schema" if with_schema else "json"]))
            if with_schema:
                schema = _encoder.encode(form["json_schema"].get("schema", {}))
                tensors.append(texts_tensor(specs[_GUIDE], [schema]))
        tensors += switch_tensors(specs, _STREAM, on=fields.get("stream", False))
        return tensors + switch_tensors(specs, (*_EXCLUDE, *_SWITCHES))  # the server repeats the prompt for `echo`


def _number(spec: TensorSpec, value: float, field: str) -> Tensor:
    if spec.datatype not in _FORMATS:
        raise ApiError(f"the model's input '{spec.name}' is {spec.datatype}, expected a number", param=field)
    form = _FORMATS[spec.datatype]
    if spec.datatype == "UINT64" and value < 0:
        value += 1 << 64  # a seed: any 64 bits
    try:
        data = struct.pack(form, value if form[1] in "fd" else int(value))
    except (struct.error, OverflowError):
        raise ApiError(f"{value} is not in the range of the model's input '{spec.name}' ({spec.datatype})", 422,
                       param=field, kind="out_of_range") from None  # fmt: skip
    return Tensor(spec.name, spec.datatype, input_shape(spec), data)


def input_each(spec: ModelSpec) -> InputEach | None:
    """Return the dialect of a model; None if it has another one, or none."""
    specs = _without_prefix(spec.inputs)
    if TEXT_INPUT not in specs or "max_tokens" not in specs or TEXT_OUTPUT not in spec.outputs:
        return None
    known = {TEXT_INPUT, *_NUMBERS.values(), _STOP, *_STREAM, *_EXCLUDE, *_SWITCHES}
    if any(name.removeprefix(PREFIX) not in known for name in spec.required_inputs):
        return None
    honoured = frozenset(field for field, name in _NUMBERS.items() if name in specs)
    honoured |= _RENDERED if spec.tokenizer_folder else frozenset()
    if _GUIDE_TYPE in specs and _GUIDE in specs:
        honoured |= {"response_format"}
    parser = spec.parameters.get(TOOL_PARSER, "")
    return InputEach(spec.name, specs, honoured, bool(spec.tokenizer_folder), tool_parser=parser)


def _without_prefix(inputs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name.removeprefix(PREFIX): tensor for name, tensor in inputs.items()}


# ---- vectors ---------------------------------------------------------------------------------


EMBEDDING_OUTPUT = "embedding"

EMBEDDING_INPUT = "embedding_request"

_vector_decoder = msgspec.json.Decoder(list[float])


class EmbeddingDialect(Protocol):
    """How one model is spoken to."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def honoured(self) -> frozenset[str]:
        """The fields that reach the model, and `prompt_token_ids` if it takes token ids."""

    @property
    def reason(self) -> str:
        """Why it does not honour others, as the end of a sentence."""

    @property
    def tokenizes(self) -> bool:
        """Whether texts become token ids here."""

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        """Return the inputs of a request for the vector of `fields["input"]`, one text or one list of token ids.

        Of a model whose dialect tokenizes they are token ids, and `fields["width"]` is how many the model gets.
        """

    def vector(self, response: Response) -> bytes:
        """Return the vector in a response, as FP32. Raises `InternalError` if there is none."""


class OurEmbeddings(msgspec.Struct, frozen=True):
    """An `EmbeddingDialect`."""

    model: str
    honoured: frozenset[str]
    request: TensorSpec
    reason: str = "does not say that it honours it (naiad.openai_fields)"
    tokenizes: bool = False

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        return [texts_tensor(self.request, [_encoder.encode(fields)])]

    def vector(self, response: Response) -> bytes:
        for output in response.outputs or ():
            if output.name == EMBEDDING_OUTPUT and output.datatype == "FP32" and output.byte_size:
                return bytes(output.raw())
        raise InternalError(f"the model has sent no output '{EMBEDDING_OUTPUT}' of FP32")


class VllmEmbeddings(msgspec.Struct, frozen=True):
    """An `EmbeddingDialect`."""

    model: str
    specs: dict[str, TensorSpec]
    #: The backend declares its prompt as required, and does not read it then.
    needs_text: bool = False
    honoured: frozenset[str] = frozenset(("dimensions", "prompt_token_ids"))
    reason: str = "is one of vLLM's backend, which does not take it"
    tokenizes: bool = False

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        asked = {"input": fields["input"]}
        if "dimensions" in fields:
            asked["pooling_params"] = {"dimensions": [fields["dimensions"]]}
        inputs = switch_tensors(self.specs, ["return_num_input_tokens"])
        if self.needs_text:
            inputs.append(texts_tensor(self.specs[TEXT_INPUT], [""]))
        return [texts_tensor(self.specs[EMBEDDING_INPUT], [_encoder.encode(asked)]), *inputs]

    def vector(self, response: Response) -> bytes:
        for output in response.outputs or ():
            if output.name == TEXT_OUTPUT:
                try:
                    values = _vector_decoder.decode(only_text(output))
                except msgspec.DecodeError as error:
                    raise InternalError(f"the model's output '{TEXT_OUTPUT}' is no list of numbers: {error}") from None
                return struct.pack(f"<{len(values)}f", *values)
        raise InternalError(f"the model has sent no output '{TEXT_OUTPUT}' with a vector")


#: Inputs of encoders: token ids, which of them are text and no padding, and which of two texts they are of.
_IDS, _MASK, _KINDS = "input_ids", "attention_mask", "token_type_ids"

#: Outputs of encoders with one vector for each text, the first that a model has.
_VECTORS = ("sentence_embedding", EMBEDDING_OUTPUT, "embeddings", "text_embeds", "pooler_output")


class EncoderEmbeddings(msgspec.Struct, frozen=True):
    """An `EmbeddingDialect`: an encoder such as those that sentence-transformers exports to ONNX."""

    model: str
    honoured: frozenset[str]
    specs: dict[str, TensorSpec]
    output: str
    reason: str = "does not say that it honours it (naiad.openai_fields)"
    tokenizes: bool = True

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        ids, width = fields["input"], fields["width"]
        padding = width - len(ids)
        values = {_IDS: [*ids, *[0] * padding], _MASK: [1] * len(ids) + [0] * padding, _KINDS: [0] * width}
        return [_integers(spec, values[name]) for name, spec in self.specs.items()]

    def width(self, lengths: Sequence[int]) -> int:
        """Return how many token ids each text of a request gets, with padding. Raises `ApiError`."""
        longest, fixed = max(lengths), self.specs[_IDS].shape[-1]
        if 0 < fixed < longest:
            raise ApiError(f"an input has {longest} tokens, and model '{self.model}' takes at most {fixed}",
                           param="input")  # fmt: skip
        return fixed if fixed > 0 else longest

    def vector(self, response: Response) -> bytes:
        for output in response.outputs or ():
            if output.name == self.output and output.byte_size:
                return bytes(output.raw())
        raise InternalError(f"the model has sent no output '{self.output}'")


def _integers(spec: TensorSpec, values: list[int]) -> Tensor:
    """Return an input of integers. Raises `ApiError` for one that does not fit."""
    try:
        data = struct.pack(f"<{len(values)}{_FORMATS[spec.datatype][1]}", *values)
    except (struct.error, OverflowError):
        raise ApiError(f"a token id is not in the range of {spec.datatype}", 422, param="input",
                       kind="out_of_range") from None  # fmt: skip
    return Tensor(spec.name, spec.datatype, input_shape(spec, len(values)), data)


def encoder_embeddings(spec: ModelSpec) -> EncoderEmbeddings | None:
    """Return the dialect of an encoder with a tokenizer beside it; None for another model."""
    if not spec.tokenizer_folder or _IDS not in spec.inputs or _MASK not in spec.inputs:
        return None
    if set(spec.inputs) - {_IDS, _MASK, _KINDS} or any(
        tensor.datatype not in ("INT32", "INT64") or not tensor.shape for tensor in spec.inputs.values()
    ):
        return None
    for name in _VECTORS:
        if name in spec.outputs and spec.outputs[name].datatype == "FP32" and len(spec.outputs[name].shape) <= 2:
            honoured = declared_fields(spec.parameters.get(OPENAI_FIELDS, ""), spec.name) & {"prompt_token_ids"}
            return EncoderEmbeddings(spec.name, honoured, spec.inputs, name)
    return None


def embedding_dialect(spec: ModelSpec) -> EmbeddingDialect | None:
    """Return how a model is asked for vectors; None for a model that makes none."""
    if (
        EMBEDDING_INPUT in spec.inputs
        and TEXT_OUTPUT in spec.outputs
        and not set(spec.required_inputs) - {EMBEDDING_INPUT, TEXT_INPUT}
    ):
        return VllmEmbeddings(spec.name, spec.inputs, TEXT_INPUT in spec.required_inputs)
    if (encoder := encoder_embeddings(spec)) is not None:
        return encoder
    request, output = spec.inputs.get(REQUEST_INPUT), spec.outputs.get(EMBEDDING_OUTPUT)
    if request is None or output is None or spec.required_inputs not in ((), (REQUEST_INPUT,)):
        return None
    if request.datatype != "BYTES" or output.datatype != "FP32":
        return None
    return OurEmbeddings(spec.name, declared_fields(spec.parameters.get(OPENAI_FIELDS, ""), spec.name), request)


def required_embedding_dialect(spec: ModelSpec) -> EmbeddingDialect:
    """As `embedding_dialect`. Raises `ApiError` for a model without one."""
    found = embedding_dialect(spec)
    if found is None:
        raise ApiError(
            f"model '{spec.name}' makes no embeddings: its inputs and outputs are none of those that OpenAI's API "
            "needs (docs/openai.md)",
            param="model",
        )
    return found
