"""The names of the inputs and outputs of a PT2 file, from its call specification. Pure.

`torch.export` and AOTInductor describe how a model is called as a tree of tuples, lists and dictionaries whose leaves
are tensors. Triton names the leaves by their path: `ARGS[0]`, `ARGS[1][mask]`, `KWARGS[scale]`, `RESULT`, `RESULT[0]`.
Source of the rule: pt2/call_spec.cc and pt2/model_state.cc of Triton's pytorch backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
