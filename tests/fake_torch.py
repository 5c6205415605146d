"""A PyTorch for tests of decisions, without PyTorch: the names that `backends/pytorch` uses, over NumPy.

A TorchScript file is a zip archive with `NAME/constants.pkl` and `NAME/model.json`: the arguments of `forward`, the
schemas of its operations, and the name of a function of this module. Calls with tensors on a GPU are computed when the
current stream is waited for, on memory of `tests/fake_cuda`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import zipfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.fake_cuda import memory, runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_TYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


def add_sub(a: Any, b: Any) -> Any:
    return a + b, a - b


def increment(a: Any) -> Any:
    a += 1
    return a


def subtract(values: dict[str, Any]) -> Any:
    return values["X"] - values["Y"]


def loud(words: list[str]) -> Any:
    return [word + "!" for word in words]


_BODIES: dict[str, Callable[..., Any]] = {body.__name__: body for body in (add_sub, increment, subtract, loud)}


def save(path: Path, body: str, *arguments: tuple[str, str], schemas: tuple[str, ...] = ()) -> None:
    """Write a TorchScript file. Arguments are names and kinds of types."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/constants.pkl", "")
        archive.writestr("m/model.json", json.dumps({"body": body, "arguments": arguments, "schemas": schemas}))


class FakeTorch:
    """Takes the place of the module."""

    def __init__(self) -> None:
        #: What was set, by the name of the function.
        self.set: dict[str, Any] = {}
        self.stream: runtime.Stream | None = None
        self.modes: list[str] = []
        for name in _TYPES:
            setattr(self, name, name)
        self.bfloat16 = "bfloat16"
        self.jit = SimpleNamespace(load=self._load)
        self.backends = SimpleNamespace(cudnn=SimpleNamespace(enabled=True))
        self.cuda = SimpleNamespace(
            ExternalStream=lambda address, device: runtime.cudaStream_t(address),
            stream=self._on,
            empty_cache=lambda: self.set.update(empty_cache=True),
        )
        switches = (
            "_set_graph_executor_optimize", "_jit_set_profiling_mode", "_jit_set_profiling_executor",
            "_jit_set_texpr_fuser_enabled",
        )  # fmt: skip
        self._C = SimpleNamespace(**{name: self._setter(name) for name in switches})
        self.set_num_threads = self._setter("threads")
        self.set_num_interop_threads = self._setter("interop_threads")

    def _setter(self, name: str) -> Callable[[Any], None]:
        return lambda value: self.set.update({name: value})

    @contextlib.contextmanager
    def _on(self, stream: runtime.Stream) -> Iterator[None]:
        self.stream = stream
        yield
        self.stream = None

    def inference_mode(self) -> contextlib.AbstractContextManager[None]:
        self.modes.append("inference_mode")
        return contextlib.nullcontext()

    def no_grad(self) -> contextlib.AbstractContextManager[None]:
        self.modes.append("no_grad")
        return contextlib.nullcontext()

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, FakeTensor)

    def from_numpy(self, array: Any) -> FakeTensor:
        return FakeTensor(self, array)

    def as_tensor(self, described: Any, device: str) -> FakeTensor:
        found = described.__cuda_array_interface__
        like = np.zeros(found["shape"], found["typestr"])
        return FakeTensor(self, like, found["data"][0])

    def _load(self, path: str, map_location: str | None) -> FakeModule:
        with zipfile.ZipFile(path) as archive:
            return FakeModule(self, json.loads(archive.read("m/model.json")), map_location)


class FakeModule:
    """A TorchScript model."""

    def __init__(self, torch: FakeTorch, found: dict[str, Any], device: str | None) -> None:
        self._torch, self.device = torch, device
        self._body = _BODIES[found["body"]]
        arguments = [("self", "ClassType"), *found["arguments"]]
        self.forward = SimpleNamespace(schema=SimpleNamespace(arguments=[_argument(*each) for each in arguments]))
        nodes = [SimpleNamespace(schema=lambda text=text: text, blocks=list) for text in found["schemas"]]
        self.inlined_graph = SimpleNamespace(nodes=lambda: nodes)

    def __call__(self, *arguments: Any) -> Any:
        if not any(isinstance(each, FakeTensor) and each.is_cuda for each in arguments):
            try:
                return self._wrapped(self._body(*map(_plain, arguments)))
            except ValueError as error:
                raise RuntimeError(str(error)) from error
        zeros = [np.zeros_like(each.like) for each in arguments]
        result = self._body(*zeros)
        results = result if isinstance(result, tuple) else (result,)
        outputs = [FakeTensor(self._torch, each, memory.allocate(each.nbytes, 0)) for each in results]
        assert self._torch.stream is not None, "no current stream"
        self._torch.stream.work.append(_Call(self._body, arguments, outputs))
        return tuple(outputs) if isinstance(result, tuple) else outputs[0]

    def _wrapped(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(self._wrapped(each) for each in result)
        return FakeTensor(self._torch, result) if isinstance(result, np.ndarray) else result


class _Call(runtime.Event):
    """A computation in the work of a stream."""

    def __init__(self, body: Callable[..., Any], inputs: Any, outputs: list[FakeTensor]) -> None:
        super().__init__(0)
        self._body, self._inputs, self._outputs = body, inputs, outputs

    def run(self) -> None:
        result = self._body(*(each.read() for each in self._inputs))
        for output, array in zip(self._outputs, result if isinstance(result, tuple) else (result,), strict=True):
            ctypes.memmove(output.address, np.ascontiguousarray(array).ctypes.data, array.nbytes)


class FakeTensor:
    """A tensor: an array, or memory of a GPU with the shape and type of the array."""

    def __init__(self, torch: FakeTorch, like: Any, address: int = 0) -> None:
        self._torch, self.like, self.address = torch, like, address
        self.is_cuda, self.device = bool(address), SimpleNamespace(index=0)
        self.dtype, self.shape = str(like.dtype), like.shape

    def read(self) -> Any:
        data = ctypes.string_at(self.address, self.like.nbytes)
        return np.frombuffer(bytearray(data), self.like.dtype).reshape(self.shape)

    def clone(self) -> FakeTensor:
        copy = FakeTensor(self._torch, self.like, memory.allocate(self.like.nbytes, 0))
        assert self._torch.stream is not None
        self._torch.stream.work.append((copy.address, self.address, self.like.nbytes))
        return copy

    def dim(self) -> int:
        return len(self.shape)

    def data_ptr(self) -> int:
        return self.address

    def numpy(self) -> Any:
        assert not self.is_cuda
        return self.like

    def detach(self) -> FakeTensor:
        return self

    resolve_neg = contiguous = cpu = detach


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.like if isinstance(value, FakeTensor) else value


def _argument(name: str, kind: str) -> Any:
    return SimpleNamespace(name=name, type=SimpleNamespace(kind=lambda: kind, str=lambda: kind.removesuffix("Type")))
