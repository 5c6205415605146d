"""Arguments of `naiad infer`, NAME=VALUE, to inputs of a request. It reads NumPy files, and nothing else."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel.tools.client import ClientError
from kernel.tools.elements import BadElement, encode_elements, flat, random_elements

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


#: A value that stands for random elements, in a shape in which dimensions of any size are 1.
RANDOM = "@random"


class GivenInput(NamedTuple):
    """An input of the request."""

    name: str
    datatype: str
    shape: list[int]
    #: In row-major order, as JSON has them; of a NumPy file, BYTES may be `bytes`.
    elements: list[Any]
    #: The same as raw bytes.
    raw: bytes


def split_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Return input name → its text. Raises `ClientError`."""
    texts: dict[str, str] = {}
    for given in arguments:
        name, equals, text = given.partition("=")
        if not equals:
            raise ClientError(f"'{given}' is not of the form NAME=VALUE, NAME=@FILE.npy or NAME=@random")
        if name in texts:
            raise ClientError(f"input '{name}' is given twice: several values are one list, '{name}=[1,2]'")
        texts[name] = text
    return texts


def build_inputs(metadata: dict[str, Any], config: dict[str, Any], texts: Mapping[str, str]) -> list[GivenInput]:
    """Return the inputs of the request. Raises `ClientError`, whose message lists the model's inputs."""
    known = {tensor["name"]: tensor for tensor in metadata["inputs"]}
    takes = ", ".join(f"{t['name']} ({t['datatype']} {t['shape']})" for t in metadata["inputs"])
    for name in texts:
        if name not in known:
            raise ClientError(f"model '{metadata['name']}' has no input '{name}'; it takes {takes or 'none'}")
    optional = {tensor["name"] for tensor in config.get("input", []) if tensor.get("optional")}
    if missing := [name for name in known if name not in texts and name not in optional]:
        others = f"; {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing" if texts else ""
        raise ClientError(
            f"model '{metadata['name']}' takes {takes}: give each as NAME=VALUE, NAME=@FILE.npy or NAME=@random{others}"
        )
    return [_build_input(known[name], text) for name, text in texts.items()]


def _build_input(tensor: dict[str, Any], text: str) -> GivenInput:
    name, datatype, dims = tensor["name"], tensor["datatype"], tensor["shape"]
    if text == RANDOM:
        own = [1 if dim == -1 else dim for dim in dims]
        elements = random_elements(datatype, math.prod(own), random.Random())
    elif text.startswith("@"):
        own, elements = _read_npy(text[1:])
    else:
        value = read_value(text, datatype)
        own, elements = _shape(value), list(flat(value))
        if math.prod(own) != len(elements) or not _is_regular(value, own):
            raise ClientError(f"input '{name}' is no tensor: its lists have different lengths")
    shape = choose_shape(dims, own, len(elements))
    if shape is None:
        raise ClientError(f"input '{name}' has shape {dims}, where -1 is any size; the value given has shape {own}")
    try:
        return GivenInput(name, datatype, shape, elements, encode_elements(datatype, elements))
    except BadElement as error:
        raise ClientError(f"input '{name}' is {datatype}: {error}") from None


def read_value(text: str, datatype: str) -> Any:
    """Return the value of a text: lists of a datatype's elements, or one. A text that is not JSON is itself.

    For BYTES, JSON that is neither text nor list is text as well: `PROMPT=2` is "2".
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if datatype == "BYTES" and not isinstance(value, (str, list)) else value


def _read_npy(path: str) -> tuple[list[int], list[Any]]:
    """Return shape and elements of the array in a NumPy file. Raises `ClientError`."""
    import numpy as np  # imported late: most calls have no NumPy file

    try:
        array = np.load(path, allow_pickle=False)
        return list(array.shape), array.reshape(-1).tolist()
    except (OSError, ValueError, EOFError, AttributeError) as error:  # AttributeError: an archive of several arrays
        raise ClientError(f"cannot read '{path}' as a NumPy file: {error}") from None


def choose_shape(dims: list[int], own: list[int], count: int) -> list[int] | None:
    """Return the shape for the `count` elements of a value of shape `own`: that if it matches `dims`, else `dims` with
    the variable sizes filled in; None if the elements do not fit."""
    if len(own) == len(dims) and all(d in (-1, s) for d, s in zip(dims, own, strict=True)):
        return own
    if len(own) == len(dims) - 1 and all(d in (-1, s) for d, s in zip(dims[1:], own, strict=True)):
        return [1, *own]
    fixed = math.prod(d for d in dims if d != -1)
    variable = [index for index, d in enumerate(dims) if d == -1]
    if fixed == 0 or count % fixed or (not variable and count != fixed):
        return None
    # The last variable dimension gets the remaining factor and the others get 1, as in /generate.
    return [count // fixed if index in variable[-1:] else max(d, 1) for index, d in enumerate(dims)]


def _shape(value: Any) -> list[int]:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return shape


def _is_regular(value: Any, shape: list[int]) -> bool:
    """Whether all lists of one level have the same length."""
    if not shape:
        return not isinstance(value, list)
    return isinstance(value, list) and len(value) == shape[0] and all(_is_regular(part, shape[1:]) for part in value)
