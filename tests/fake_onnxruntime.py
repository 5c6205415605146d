"""An onnxruntime for GPUs without a GPU: the names of the real one, on the memory and the streams of `tests/fake_cuda`.

A run is computed by the real onnxruntime on the CPU, and only when its stream is waited for: who forgets that gets
zeros. Only what `backends/onnxruntime` uses of GPUs is here; all else is the real module's.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import threading
import time
from typing import Any

import numpy as np
import onnxruntime as real
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from tests.fake_cuda import memory, runtime

_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_BFLOAT16 = 16

#: Kernels read and write vectors of this number of bytes.
_VECTOR = 16

#: For whole servers: how long a run takes, in seconds, and the file that gets a line for each with the name of the
#: thread that waited for it.
EXECUTION_S, NOTES = 0.0, ""

#: A file. While it exists, runs wait until this many streams have one; then it is removed, and they go on.
HOLD, HELD_STREAMS = "", 4
_LONGEST_HOLD_S = 60

#: The streams of sessions.
_streams_of_runs: set[runtime.Stream] = set()

#: The real class, also where this module's has taken its place.
_RealSession = real.InferenceSession


class FakeOnnxRuntime:
    """Takes the place of the module."""

    SessionOptions, RunOptions = real.SessionOptions, real.RunOptions

    def __init__(self, available: tuple[str, ...] = (_CUDA, _CPU), failing: tuple[str, ...] = ()) -> None:
        """`failing` are the providers whose libraries cannot be loaded: sessions lack them, and nothing is raised."""
        self.available, self.failing = list(available), failing
        self.preloaded = 0
        #: Whether nodes of the model are not on the GPU.
        self.refuses_graphs = False
        self.sessions: list[InferenceSession] = []

    def get_available_providers(self) -> list[str]:
        return self.available

    def preload_dlls(self) -> None:
        self.preloaded += 1

    def InferenceSession(self, path: str, options: Any, **more: Any) -> InferenceSession:
        refused = self.refuses_graphs and any("enable_cuda_graph" in each for each in more["provider_options"])
        if refused:
            text = "This session cannot use the graph capture feature as requested by the user as all compute graph"
            raise Fail(f"{text} nodes have not been partitioned to the CUDAExecutionProvider")
        session = InferenceSession(path, self.failing, **more)
        self.sessions.append(session)
        return session


class InferenceSession:
    """A session whose providers are as asked for, without those that fail."""

    def __init__(
        self,
        path: str,
        failing: tuple[str, ...],
        providers: list[str],
        provider_options: list[dict[str, str]],
        enable_fallback: int,
    ) -> None:
        assert not enable_fallback
        self.options = dict(zip(providers, provider_options, strict=True))
        self._providers = [name for name in providers if name not in failing]
        self._cpu = _RealSession(path, providers=[_CPU])
        self.get_inputs, self.get_outputs = self._cpu.get_inputs, self._cpu.get_outputs
        self.get_overridable_initializers = self._cpu.get_overridable_initializers
        self.run_entries: list[dict[str, str]] = []
        #: The inputs and outputs of each run that were bound to memory of a GPU: name → address.
        self.bound: list[dict[str, int]] = []
        #: What was captured, by number, and the numbers of the graphs that were launched.
        self.graphs: dict[str, tuple[list[str], dict[str, _Place], list[OrtValue]]] = {}
        self.launched: list[str] = []

    def get_providers(self) -> list[str]:
        return self._providers

    def disable_fallback(self) -> None:
        pass

    def io_binding(self) -> IOBinding:
        return IOBinding()

    def run_with_iobinding(self, binding: IOBinding, run_options: Any) -> None:
        graphs = self.options[_CUDA].get("enable_cuda_graph") == "1"
        number = run_options.get_run_config_entry("gpu_graph_id") if graphs else "-1"
        assert number, "0 is reserved: a run of a session with graphs says which one, or -1"
        if number in self.graphs:
            self._launch(number)
            return
        entry = "disable_synchronize_execution_providers"
        waits = run_options is None or run_options.get_run_config_entry(entry) != "1"
        stream = runtime.cudaStream_t(int(self.options[_CUDA]["user_compute_stream"]))
        names = list(binding.outputs)
        zeros = {name: np.zeros(place.shape, place.dtype) for name, place in binding.inputs.items()}
        values = []
        for name, array in zip(names, self._cpu.run(names, zeros), strict=True):
            wanted = binding.outputs[name]
            if isinstance(wanted, _Place) and wanted.shape != list(array.shape):
                raise RuntimeError(f"output '{name}' has the shape {array.shape}, and is bound as {wanted.shape}")
            values.append(OrtValue(array, wanted))
        self.bound.append({name: place.address for name, place in binding.inputs.items() if place.address})
        binding.values = values
        stream.work.append(_Run(self._cpu, names, dict(binding.inputs), values))
        if isinstance(stream, runtime.Stream):
            _streams_of_runs.add(stream)
            stream.takes(runtime.clock.execution_ms)
        if number != "-1":
            assert all(isinstance(wanted, _Place) for wanted in binding.outputs.values()), "memory that may move"
            assert all(place.address for place in binding.inputs.values()), "an input on the host"
            self.graphs[number] = names, dict(binding.inputs), values
        if waits:
            stream.run()

    def _launch(self, number: str) -> None:
        """Compute with the addresses of the capture, whatever is bound now."""
        names, inputs, values = self.graphs[number]
        self.launched.append(number)
        runtime.cudaStream_t(int(self.options[_CUDA]["user_compute_stream"])).work.append(
            _Run(self._cpu, names, inputs, values)
        )


class _Place:
    """Bound memory of a GPU, or an array."""

    def __init__(self, element: Any, shape: list[int], address: int, array: Any = None) -> None:
        self.dtype = np.dtype(np.uint16 if element == _BFLOAT16 else element)
        self.shape, self.address, self.array = shape, address, array

    def read(self) -> Any:
        if self.array is not None:
            return self.array
        byte_size = int(np.prod(self.shape)) * self.dtype.itemsize
        data = ctypes.string_at(self.address, byte_size)
        return np.frombuffer(data, self.dtype).reshape(self.shape)


class _Run(runtime.Event):
    """A computation in the work of a stream."""

    def __init__(self, session: Any, names: list[str], inputs: dict[str, _Place], values: list[OrtValue]) -> None:
        super().__init__(0)
        self._session, self._names, self._inputs, self._values = session, names, inputs, values

    def run(self) -> None:
        if EXECUTION_S:
            time.sleep(EXECUTION_S)
        if NOTES:
            with open(NOTES, "a", encoding="utf-8") as file:
                file.write(f"{threading.current_thread().name}\n")
        if HOLD:
            _hold_until_streams_have_runs()
        places = [*self._inputs.values(), *(value.wanted for value in self._values)]
        if any(isinstance(place, _Place) and place.address % _VECTOR for place in places):
            runtime.lose_device(runtime.cudaError_t.cudaErrorMisalignedAddress)
            return
        arrays = {name: place.read() for name, place in self._inputs.items()}
        for value, array in zip(self._values, self._session.run(self._names, arrays), strict=True):
            value.fill(np.ascontiguousarray(array))


def _hold_until_streams_have_runs() -> None:
    give_up = time.monotonic() + _LONGEST_HOLD_S
    while os.path.exists(HOLD) and time.monotonic() < give_up:
        others = sum(any(isinstance(each, _Run) for each in [*stream.work]) for stream in [*_streams_of_runs])
        if 1 + others >= HELD_STREAMS:
            pathlib.Path(HOLD).unlink(missing_ok=True)
        time.sleep(0.001)


class OrtValue:
    """An output: on the device, or on the host. It has zeros until its stream was waited for."""

    def __init__(self, like: Any, wanted: _Place | str) -> None:
        self.wanted = wanted
        self._shape = list(like.shape)
        self._host = np.zeros_like(like) if wanted == "cpu" else None
        self._own = 0
        self._address = 0
        if isinstance(wanted, _Place):
            self._address = wanted.address
        elif wanted == "cuda":
            self._own = self._address = memory.allocate(like.nbytes, 0)

    def fill(self, array: Any) -> None:
        if self._host is not None:
            self._host[...] = array
        else:
            ctypes.memmove(self._address, array.ctypes.data, array.nbytes)

    def shape(self) -> list[int]:
        return self._shape

    def data_ptr(self) -> int:
        return self._address

    def device_name(self) -> str:
        return "cuda" if self._host is None else "cpu"

    def numpy(self) -> Any:
        assert self._host is not None, "the real one raises for values on a GPU"
        return self._host


class IOBinding:
    """What the next run reads and writes."""

    def __init__(self) -> None:
        self.inputs: dict[str, _Place] = {}
        self.outputs: dict[str, _Place | str] = {}
        self.values: list[OrtValue] = []

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: list[int], buffer_ptr: int
    ) -> None:
        assert device_type == "cuda"
        self.inputs[name] = _Place(element_type, shape, buffer_ptr)

    def bind_cpu_input(self, name: str, array: Any) -> None:
        self.inputs[name] = _Place(array.dtype, list(array.shape), 0, array)

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: list[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        if buffer_ptr is None:
            self.outputs[name] = device_type
        else:
            assert shape is not None
            self.outputs[name] = _Place(element_type, shape, buffer_ptr)

    def get_outputs(self) -> list[OrtValue]:
        return self.values

    def clear_binding_inputs(self) -> None:
        self.inputs.clear()

    def clear_binding_outputs(self) -> None:
        self.outputs.clear()
