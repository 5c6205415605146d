"""The values of the inputs of `naiad bench`: random, zeros, or from a file. Reads files and nothing else."""

from __future__ import annotations

import base64
import json
import random
import zipfile
from typing import TYPE_CHECKING, Any

from kernel.tools.bench.requests import BenchInput
from kernel.tools.client import ClientError
from kernel.tools.elements import BadElement, encode_elements, flat, random_elements
from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np

RANDOM, ZERO = "random", "zero"

#: How many random elements are made; larger inputs repeat them.
_RANDOM_ELEMENTS = 1 << 14

#: The most different requests of a file.
MAX_REQUESTS = 4096


class InputShapes:
    """The shapes of a model's inputs in a request, with the batch."""

    def __init__(
        self, metadata: Mapping[str, Any], config: Mapping[str, Any] | None, given: Mapping[str, list[int]], batch: int
    ) -> None:
        """`given` are the shapes of `--shape`, without the dimension of the batch. Raises `ClientError`."""
        self.tensors: list[dict[str, Any]] = list(metadata["inputs"])
        names = [tensor["name"] for tensor in self.tensors]
        if unknown := [tensor["datatype"] for tensor in self.tensors if tensor["datatype"] not in DATATYPES]:
            raise ClientError(f"this command does not know the datatype '{unknown[0]}'")
        if unknown := [name for name in given if name not in names]:
            raise ClientError(f"--shape: the model has no input '{unknown[0]}'; it takes {', '.join(names)}")
        self._given = given
        self._batch = batch
        self._batches = bool(config and config.get("max_batch_size", 0))
        if config and batch > max(config.get("max_batch_size", 0), 1):
            most = config.get("max_batch_size", 0)
            raise ClientError(
                f"--batch-size {batch}: the model takes batches of up to {most}"
                if most
                else f"--batch-size {batch}: the model takes no batches (max_batch_size is 0)"
            )
        self.optional = {each["name"] for each in (config or {}).get("input", []) if each.get("optional")}
        #: Inputs with dimensions of any size for which 1 was taken.
        self.guessed: list[str] = []

    def of(self, tensor: Mapping[str, Any]) -> list[int]:
        """Return the shape of an input."""
        name, dims = tensor["name"], [int(dim) for dim in tensor["shape"]]
        own = dims[1:] if self._batches else dims
        if name in self._given:
            given = self._given[name]
            if len(given) != len(own) or any(dim not in (-1, size) for dim, size in zip(own, given, strict=True)):
                raise ClientError(f"--shape: input '{name}' has shape {own}, where -1 is any size, and not {given}")
            own = given
        elif -1 in own:
            if not self._batches and self._batch > 1 and own[0] == -1:
                own = [self._batch, *own[1:]]
            if -1 in own:
                self.guessed.append(f"{name} {own}")
            own = [1 if dim == -1 else dim for dim in own]
        return [self._batch, *own] if self._batches else own


def generated_values(shapes: InputShapes, kind: str) -> list[list[BenchInput]]:
    """Return the inputs of one request with random values or zeros. Optional inputs are left out."""
    source = random.Random(0)  # the same values in each run
    found = []
    for tensor in shapes.tensors:
        if tensor["name"] in shapes.optional:
            continue
        shape = shapes.of(tensor)
        raw = _generated(tensor["datatype"], element_count(shape), source if kind == RANDOM else None)
        found.append(BenchInput(tensor["name"], tensor["datatype"], shape, raw))
    return [found]


def _generated(datatype: str, count: int, source: random.Random | None) -> bytes:
    made = max(1, min(count, _RANDOM_ELEMENTS))
    zero: Any = {"BYTES": "", "BOOL": False}.get(datatype, 0)
    elements = [zero] * made if source is None else random_elements(datatype, made, source)
    if datatype == "BYTES":
        return encode_elements(datatype, [elements[index % made] for index in range(count)])
    raw = encode_elements(datatype, elements)
    size = count * (len(raw) // made)
    return (raw * -(-size // len(raw)))[:size]


def file_values(shapes: InputShapes, path: Path) -> list[list[BenchInput]]:
    """Return the inputs of the requests in a file or folder. Raises `ClientError`.

    JSON is that of perf_analyzer (`data`) or the body of a request (`inputs`); a file of NumPy has an array for
    each input (.npz), or the array of the only input (.npy); a folder has a file with the raw bytes of each input.
    """
    try:
        if path.is_dir():
            found = [_folder_inputs(shapes, path)]
        elif path.suffix in (".npy", ".npz"):
            found = [_numpy_inputs(shapes, path)]
        else:
            found = _json_inputs(shapes, json.loads(path.read_bytes()), path)
    except OSError as error:
        raise ClientError(f"--input: cannot read '{path}': {error.strerror or error}") from None
    except RecursionError:
        raise ClientError(f"--input: cannot read '{path}': its lists are nested too deeply") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ClientError(f"--input: cannot read '{path}': {error}") from None
    if not found:
        raise ClientError(f"--input: '{path}' has no request")
    if len(found) > MAX_REQUESTS:
        raise ClientError(f"--input: '{path}' has {len(found)} requests; the most are {MAX_REQUESTS}")
    return found


def _folder_inputs(shapes: InputShapes, folder: Path) -> list[BenchInput]:
    found = []
    for tensor in shapes.tensors:
        file = folder / tensor["name"]
        if not file.exists():
            if tensor["name"] in shapes.optional:
                continue
            raise ClientError(f"--input: there is no file for input '{tensor['name']}' in '{folder}'")
        raw = file.read_bytes()
        if tensor["datatype"] == "BYTES":
            raw = encode_elements("BYTES", [raw])
        found.append(_checked(tensor, shapes.of(tensor), raw))
    return found


def _numpy_inputs(shapes: InputShapes, path: Path) -> list[BenchInput]:
    import numpy as np  # imported late: most runs have no NumPy file

    with path.open("rb") as file:  # NumPy leaves it open where it cannot read it
        loaded: Any = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray) != (path.suffix == ".npy"):  # NumPy looks at the content, not at the name
            raise ClientError(f"--input: '{path}' is not what its ending {path.suffix} says")
        arrays: dict[str, Any] = {"": loaded} if path.suffix == ".npy" else dict(loaded)
    if path.suffix == ".npy":
        if len(shapes.tensors) != 1:
            names = ", ".join(tensor["name"] for tensor in shapes.tensors)
            raise ClientError(f"--input: the model takes {names}: give an .npz file with an array for each")
        arrays = {shapes.tensors[0]["name"]: loaded}
    _check_names(shapes, arrays, path)
    return [_array_input(tensor, arrays[tensor["name"]]) for tensor in shapes.tensors if tensor["name"] in arrays]


def _array_input(tensor: Mapping[str, Any], array: np.ndarray[Any, Any]) -> BenchInput:
    datatype, shape = tensor["datatype"], list(array.shape)
    if datatype == "BYTES":
        return BenchInput(tensor["name"], datatype, shape, encode_elements(datatype, array.reshape(-1).tolist()))
    wanted = DATATYPES[datatype].numpy
    if not wanted:
        raise ClientError(f"--input: NumPy has no {datatype}, which input '{tensor['name']}' is")
    if array.dtype.newbyteorder("<") != wanted and array.dtype.str[1:] != wanted[1:]:
        raise ClientError(f"--input: input '{tensor['name']}' is {datatype}, and the array is {array.dtype}")
    return _checked(tensor, shape, array.astype(wanted).tobytes())


def _check_names(shapes: InputShapes, given: Mapping[str, Any], path: Path) -> None:
    names = [tensor["name"] for tensor in shapes.tensors]
    if unknown := [name for name in given if name not in names]:
        raise ClientError(f"--input: '{path}' has '{unknown[0]}', and the model takes {', '.join(names)}")
    if missing := [name for name in names if name not in given and name not in shapes.optional]:
        raise ClientError(f"--input: input '{missing[0]}' is not in '{path}'")


def _json_inputs(shapes: InputShapes, document: Any, path: Path) -> list[list[BenchInput]]:
    if isinstance(document, dict) and isinstance(document.get("inputs"), list):
        given = {each["name"]: each for each in document["inputs"] if isinstance(each, dict) and "name" in each}
        entries: list[dict[str, Any]] = [
            {name: {"content": each.get("data", []), "shape": each.get("shape")} for name, each in given.items()}
        ]
        batched = True
    elif isinstance(document, dict) and isinstance(document.get("data"), list):
        # Lists in the list are the steps of sequences.
        entries = list(flat(document["data"]))
        batched = False
    else:
        raise ClientError(
            f'--input: \'{path}\' has neither "data", as the files of perf_analyzer, nor "inputs", as a request'
        )
    found = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise ClientError(f"--input: '{path}': each entry of \"data\" is an object with the inputs")
        _check_names(shapes, entry, path)
        tensors = [tensor for tensor in shapes.tensors if tensor["name"] in entry]
        found.append([_json_input(shapes, tensor, entry[tensor["name"]], batched=batched) for tensor in tensors])
    return found


def _json_input(shapes: InputShapes, tensor: Mapping[str, Any], value: Any, *, batched: bool) -> BenchInput:
    name, datatype = tensor["name"], tensor["datatype"]
    content, shape = value, None
    if isinstance(value, dict):
        shape = value.get("shape")
        content = value.get("content", value)
    own = shapes.of(tensor)
    if shape is not None:
        if not isinstance(shape, list) or not all(type(dim) is int and dim >= 0 for dim in shape):
            raise ClientError(f"--input: input '{name}' has the shape {shape!r}, which is no list of sizes")
        # Shapes in files of perf_analyzer are without the batch, and shapes of a request have it.
        own = list(shape) if batched or len(shape) == len(own) else [*own[:1], *shape]
    if isinstance(content, dict):
        if not isinstance(content.get("b64"), str):
            raise ClientError(f"--input: input '{name}' is neither a list nor {{\"b64\": TEXT}}")
        return _checked(tensor, own, base64.b64decode(content["b64"]))
    elements = list(flat(content)) if isinstance(content, list) else [content]
    try:
        raw = encode_elements(datatype, elements)
    except BadElement as error:
        raise ClientError(f"--input: input '{name}' is {datatype}: {error}") from None
    count = element_count(own)
    if elements and count % len(elements) == 0 and count > len(elements):
        raw *= count // len(elements)  # each row of the batch is the same
    elif len(elements) != count:
        raise ClientError(f"--input: input '{name}' has {len(elements)} elements, and shape {own} takes {count}")
    return BenchInput(name, datatype, own, raw)


def _checked(tensor: Mapping[str, Any], shape: Sequence[int], raw: bytes) -> BenchInput:
    """Return the input of raw bytes. Raises `ClientError` if the shape takes another number of them."""
    size = DATATYPES[tensor["datatype"]].byte_size
    if size and len(raw) != (expected := element_count(shape) * size):
        raise ClientError(
            f"--input: input '{tensor['name']}' has {len(raw)} bytes, and {tensor['datatype']} {list(shape)} has "
            f"{expected}; --shape says another shape"
        )
    return BenchInput(tensor["name"], tensor["datatype"], list(shape), raw)
