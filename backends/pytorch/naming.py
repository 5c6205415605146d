"""Which input of a configuration is which argument of a model, and which output which result. Pure.

Rules and texts are those of Triton's pytorch backend (model_instance_state.cc). It has three conventions for names, and
takes the first that all inputs follow: names of `forward`'s arguments, `NAME__INDEX`, the order in the configuration.
Outputs have the latter two. Inputs and outputs of PT2 files may also have the names of `call_spec.py`.

The names of the inputs and outputs of a PT2 file, from its call specification. Pure.

`torch.export` and AOTInductor describe how a model is called as a tree of tuples, lists and dictionaries whose leaves
are tensors. Triton names the leaves by their path: `ARGS[0]`, `ARGS[1][mask]`, `KWARGS[scale]`, `RESULT`, `RESULT[0]`.
Source of the rule: pt2/call_spec.cc and pt2/model_state.cc of Triton's pytorch backend.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import msgspec

from backends.pytorch.conversion import is_supported
from backends.reshape import tensor_specs
from backends.worker.sequence_config import correlation_id_control, flag_controls
from kernel.errors import InternalError, InvalidArgument
from shm.datatypes import BY_CONFIG_NAME, DATATYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from backends.base import Config
    from backends.pytorch.model_file import ModelSignature
    from backends.reshape import TensorShapes

_TUPLE, _DICT = "builtins.tuple", "builtins.dict"

#: The kinds of nodes whose children are counted.
_COUNTED = (_TUPLE, "builtins.list")


def input_names(specification: str) -> list[str]:
    """Return the names of a model's inputs, in the order in which its tensors are passed.

    `specification` is the JSON of PyTorch's `treespec_dumps`, of the arguments and keyword arguments together.
    Raises `InternalError` if it is of another form.
    """
    root = _root(specification)
    children = root.get("children_spec") or []
    if root.get("type") != _TUPLE or len(children) != 2 or children[1].get("type") != _DICT:
        raise InternalError(f"the model file describes its arguments in an unknown form: {specification[:200]}")
    arguments, keywords = children
    return [f"ARGS{path}" for path in _paths(arguments)] + [f"KWARGS{path}" for path in _paths(keywords)]


def output_names(specification: str) -> list[str]:
    """Return the names of a model's outputs, in the order in which it returns them. Raises `InternalError`."""
    return [f"RESULT{path}" for path in _paths(_root(specification))]


def accepted_spelling(name: str) -> str:
    """Return an input's name with brackets around the key of a keyword argument, which Triton leaves out."""
    key = name.removeprefix("KWARGS")
    return f"KWARGS[{key}]" if key and key != name and not key.startswith("[") else name


def _root(specification: str) -> dict[str, Any]:
    try:
        version, root = msgspec.json.decode(specification)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise InternalError(f"the model file has an unreadable call specification: {error}") from error
    if version != 1 or not isinstance(root, dict):
        raise InternalError(f"the model file has a call specification of version {version}, expected 1")
    return root


def _paths(node: dict[str, Any]) -> Iterator[str]:
    """Yield the path of each leaf below a node; the path of a leaf itself is empty."""
    kind, children = node.get("type"), node.get("children_spec") or []
    if kind is None:
        yield ""
    elif kind in _COUNTED:
        for index, child in enumerate(children):
            yield from (f"[{index}]{path}" for path in _paths(child))
    elif kind == _DICT:
        for key, child in zip(_keys(node), children, strict=True):
            yield from (f"[{key}]{path}" for path in _paths(child))
    else:
        raise InternalError(
            f"the model file has inputs or outputs in a '{kind}'; tensors, tuples, lists and dictionaries are supported"
        )


def _keys(node: dict[str, Any]) -> list[Any]:
    context = node.get("context")
    keys = msgspec.json.decode(context) if isinstance(context, str) else context
    return keys if isinstance(keys, list) else []


_DELIMITER = "__"


class Places(msgspec.Struct, frozen=True):
    """The places of a configuration's tensors in calls of the model."""

    #: Name → index of the argument, of inputs, control tensors, states and batch inputs.
    inputs: dict[str, int]
    #: Name → index of the result, of outputs and states.
    outputs: dict[str, int]
    #: Lines for the log, about names that follow no convention.
    warnings: tuple[str, ...] = ()


class _Convention(enum.Enum):
    ARGUMENT = "names of arguments"
    INDEX = "NAME__INDEX"
    ORDER = "the order in the configuration"


def places(config: Config, signature: ModelSignature) -> Places:
    """Return the places of all tensors of a complete configuration.

    Raises `InvalidArgument` or `InternalError` with Triton's text if the configuration does not fit the model.
    """
    model = str(config["name"])
    inputs, outputs = tensor_specs(config, "input"), tensor_specs(config, "output")
    controls = _control_places(config)
    _check_arguments(config, signature, len(controls))
    for what, specs in (("input", inputs), ("output", outputs)):
        if not specs:
            raise InternalError(f"model configuration must contain at least one {what}, none were specified.")
    states, warnings = _states(config), list[str]()
    batch_inputs = [name for entry in config.get("batch_input", []) for name in entry.get("target_name", [])]

    state_inputs, state_outputs = [each["input_name"] for each in states], [each["output_name"] for each in states]

    found = _by_path(signature.input_paths, [*inputs, *controls, *state_inputs, *batch_inputs])
    if found is None:
        convention = _convention(config, "input", inputs, [each.name for each in signature.arguments], warnings)
        _check_states(model, convention, state_inputs)
        found = dict(controls)
        for index, name in enumerate([*inputs, *batch_inputs]):
            found[name] = _place(convention, name, index, signature)
        found.update((name, _index(name)) for name in state_inputs)
    _check_datatypes(model, inputs, outputs, states)
    _check_complete(model, found, signature)

    results = _by_path(signature.output_paths, [*outputs, *state_outputs])
    if results is None:
        convention = _convention(config, "output", outputs, [], warnings)
        _check_states(model, convention, state_outputs)
        results = {
            name: _index(name) if convention is _Convention.INDEX else index for index, name in enumerate(outputs)
        }
        results.update((name, _index(name)) for name in state_outputs)
    if signature.output_paths is not None:
        for name, index in results.items():
            check_result(name, index, len(signature.output_paths))
    return Places(found, results, tuple(warnings))


def check_result(name: str, index: int, count: int) -> None:
    """Raise `InvalidArgument` if a model with `count` outputs has none for the configuration's output `name`."""
    if index >= count:
        raise InvalidArgument(
            f"The output {name} in the model configuration refers to an output index which doesn't exist. "
            f"This model has {count} outputs"
        )


# ---- arguments of the model -----------------------------------------------------------------


def _check_arguments(config: Config, signature: ModelSignature, control_count: int) -> None:
    """Raise an error if the model takes other values than tensors, or another number of them."""
    expected = len(config.get("input", [])) + control_count
    expected += sum(len(entry.get("target_name", [])) for entry in config.get("batch_input", []))
    expected += len(_states(config))
    if signature.takes_dictionary:
        return
    if any(argument.kind == "DictType" for argument in signature.arguments[1:]):
        raise InternalError(
            "Multiple inputs of kind DictType were detected. Only a single input of type Dict(str, Tensor) is "
            "supported."
        )
    for argument in signature.arguments:
        if argument.kind not in ("TensorType", "ListType"):
            raise InternalError(
                f"An input of type '{argument.type_name}' was detected in the model. Only a single input of type "
                "Dict(str, Tensor) or input(s) of type Tensor are supported."
            )
    provided = len(signature.arguments) if signature.input_paths is None else len(signature.input_paths)
    if (signature.arguments or signature.input_paths) and provided != expected:
        raise InvalidArgument(
            f"unable to load model '{config['name']}', configuration expects {expected} inputs, model provides "
            f"{provided}"
        )


def _check_complete(model: str, found: Mapping[str, int], signature: ModelSignature) -> None:
    """Raise `InvalidArgument` unless each argument of the model has exactly one input."""
    if signature.takes_dictionary:
        return
    by_index: dict[int, str] = {}
    for name, index in found.items():
        if index in by_index:
            raise InvalidArgument(
                f"unable to load model '{model}', the inputs '{by_index[index]}' and '{name}' are both argument "
                f"{index} of the model"
            )
        by_index[index] = name
    for name, index in found.items():
        if index >= len(found):
            raise InvalidArgument(
                f"unable to load model '{model}', the input '{name}' is argument {index} of the model, which has "
                f"{len(found)} arguments, from 0 to {len(found) - 1}"
            )


# ---- conventions ----------------------------------------------------------------------------


def _by_path(paths: Sequence[str] | None, names: Iterable[str]) -> dict[str, int] | None:
    """Return name → index if each of the names is the path of a tensor in a PT2 file's call, else None."""
    indices = {path: index for index, path in enumerate(paths or ())}
    found = {name: indices.get(accepted_spelling(name), -1) for name in names}
    return None if -1 in found.values() else found


def _convention(
    config: Config, what: str, names: Iterable[str], arguments: Sequence[str], warnings: list[str]
) -> _Convention:
    names = list(names)
    if what == "input" and arguments and all(name in arguments for name in names):
        return _Convention.ARGUMENT
    for name in names:
        if _DELIMITER not in name:
            return _Convention.ORDER
        if not _follows_index(name):
            neither = "s) are neither an input argument to the" if what == "input" else "s) of the"
            middle = (
                f"{neither} model '{config['name']}' nor do they"
                if what == "input"
                else f"{neither} model '{config['name']}' do not"
            )
            warnings.append(
                f"{what} '{name}' or previous {what}({middle} follow the <name>__<index> naming convention. Falling "
                "back to enforcing strict ordering from model configuration."
            )
            return _Convention.ORDER
    return _Convention.INDEX


def _place(convention: _Convention, name: str, index: int, signature: ModelSignature) -> int:
    if signature.takes_dictionary or convention is _Convention.ORDER:
        return index
    if convention is _Convention.INDEX:
        return _index(name)
    names = [argument.name for argument in signature.arguments]
    # A batch input may have another name than an argument; its place is behind the inputs.
    return names.index(name) if name in names else index


def _follows_index(name: str) -> bool:
    _, delimiter, index = name.partition(_DELIMITER)
    return bool(delimiter) and (index == "" or (index.isascii() and index.isdigit()))


def _index(name: str) -> int:
    return int(name.partition(_DELIMITER)[2] or 0)


# ---- control tensors and states -------------------------------------------------------------


def _control_places(config: Config) -> dict[str, int]:
    """Return the indices of control tensors, which always follow `NAME__INDEX`. Raises `InternalError`."""
    controls = [(control.name, control.datatype) for control in flag_controls(config)]
    correlation_id = correlation_id_control(config)
    if correlation_id is not None:
        controls.append((correlation_id.name, correlation_id.datatype))
    for name, datatype in controls:
        if not _follows_index(name):
            raise InternalError(f"input '{name}' does not follow <name>__<index> naming convention.")
        if datatype == "BYTES" or not is_supported(datatype):
            raise InternalError(f"input '{name}' type '{DATATYPES[datatype].config_name}' is not supported by PyTorch.")
    return {name: _index(name) for name, _ in controls}


def _check_states(model: str, convention: _Convention, names: Sequence[str]) -> None:
    prefix = f"PyTorch model '{model}' is using sequence batching with state but"
    if names and convention is not _Convention.INDEX:
        raise InvalidArgument(f"{prefix} not all inputs and outputs follow the <name>__<index> naming convention. ")
    for name in names:
        if not _follows_index(name):
            raise InvalidArgument(f"{prefix} state '{name}' does not follow the <name>__<index> naming convention. ")


def _states(config: Config) -> Sequence[Mapping[str, Any]]:
    states: Sequence[Mapping[str, Any]] = config.get("sequence_batching", {}).get("state", [])
    return states


def _check_datatypes(
    model: str,
    inputs: Mapping[str, TensorShapes],
    outputs: Mapping[str, TensorShapes],
    states: Sequence[Mapping[str, Any]],
) -> None:
    _check_specs(model, "input", inputs.values())
    _check_specs(model, "output", outputs.values())
    for state in states:
        if not is_supported(BY_CONFIG_NAME[state["data_type"]].name):
            raise InternalError(
                f"unsupported datatype {state['data_type']} for input state '{state['input_name']}' for model '{model}'"
            )


def _check_specs(model: str, what: str, specs: Iterable[TensorShapes]) -> None:
    for spec in specs:
        if not is_supported(spec.datatype):
            raise InternalError(
                f"unsupported datatype {DATATYPES[spec.datatype].config_name} for {what} '{spec.name}' for model "
                f"'{model}'"
            )
        if spec.datatype == "BYTES" and len(spec.model_dims) + spec.batched > 1:
            raise InternalError(
                f"Triton only supports 1 dimensional List of String as {what} for '{spec.name}' for model '{model}'"
            )
