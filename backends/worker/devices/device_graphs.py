"""CUDA graphs of an instance: captured when the model is loaded, launched for batches of their shapes.

A graph has the addresses of its inputs and outputs, so it has memory of its own for them, and batches are copied there.
All graphs of an instance share that memory: their batches follow one another. For backends with graphs.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import msgspec

from backends.worker.devices.graph_specs import GraphKey, best_graph, key_of_captured, outputs_of_batch
from backends.worker.devices.instance_device import end_if_lost
from backends.worker.devices.tensors import DeviceArray
from kernel.errors import InternalError, ServingError
from shm.cuda import CudaError
from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.worker.devices.graph_specs import GraphSpec
    from backends.worker.devices.instance_device import DeviceBlock, InstanceDevice


class DeviceGraph(msgspec.Struct, frozen=True, eq=False):
    """A graph, what it was captured with, and what the backend needs to launch it."""

    key: GraphKey
    inputs: dict[str, DeviceArray]
    outputs: dict[str, DeviceArray]
    launched: Any


class DeviceGraphs(abc.ABC):
    """The graphs of one instance, or of one of its optimization profiles. Owns them and their memory. Not thread-safe.

    A subclass captures and launches with its library.
    """

    #: What a capture may raise: the model runs without that graph then.
    failures: tuple[type[Exception], ...] = (ServingError, CudaError)

    def __init__(self, device: InstanceDevice, stream: int, name: str) -> None:
        """`stream` is the address of the stream that executes, `name` is the instance's."""
        self._device = device
        self._stream = device.cuda.stream_of(stream)
        self._name = name
        self._graphs: list[DeviceGraph] = []
        self._keys: list[GraphKey] = []
        self._blocks: dict[str, DeviceBlock] = {}

    # ---- loading ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def _key(self, spec: GraphSpec) -> GraphKey | str:
        """Return the shapes of a graph, or a text that says why it cannot be captured."""

    @abc.abstractmethod
    def _capture(self, key: GraphKey, inputs: dict[str, DeviceArray]) -> tuple[Any, dict[str, DeviceArray]]:
        """Capture a graph that reads `inputs`, which have zeros. Returns what launches it, and its outputs.

        Raises `failures`.
        """

    @abc.abstractmethod
    def _input_datatype(self, name: str) -> str | None:
        """Return the datatype of an input; None for one that no client can send."""

    def capture(self, specs: Sequence[GraphSpec], warn: Callable[[str], None]) -> None:
        """Capture a graph for each specification. `warn` is called for each that fails: the model runs without it."""
        keys: list[GraphKey] = []
        for spec in specs:
            found = self._key(spec)
            if isinstance(found, str):
                warn(f"unable to record CUDA graph for {self._name}, batch size {spec.batch_size}: {found}")
            elif any(found.shapes == key.shapes for key in keys):
                warn(
                    f"Detected duplicated CUDA graph specification for {self._name}, skipping the duplicated "
                    "specification"
                )
            else:
                keys.append(found)
        # The largest first: its blocks do for all others, so that no graph loses its memory to a larger one.
        for key in sorted(keys, key=_element_total, reverse=True):
            try:
                self._add(key)
            except self.failures as error:
                if isinstance(error, CudaError):
                    end_if_lost(error)
                self._device.synchronize()  # ends the process if the device is lost
                warn(f"unable to record CUDA graph for {self._name}, shapes {dict(key.shapes)}: {error}")

    def _add(self, key: GraphKey) -> None:
        inputs = {name: self._array(name, self._input_datatype(name), shape) for name, shape in key.shapes}
        for array in inputs.values():
            self._device.cuda.enqueue_fill(array.address, array.nbytes, self._stream)
        launched, outputs = self._capture(key, inputs)
        key = key_of_captured(key, outputs.values())
        self._keys.append(key)
        self._graphs.append(DeviceGraph(key, inputs, outputs, launched))

    def _array(self, name: str, datatype: str | None, shape: tuple[int, ...]) -> DeviceArray:
        """Return memory for a tensor, which all graphs share. Raises `InternalError`."""
        if datatype is None:
            raise InternalError(f"tensor '{name}' has a type that no client can send")
        byte_size = element_count(shape) * DATATYPES[datatype].byte_size
        found = self._blocks.get(name)
        if found is None or found.byte_size < byte_size:
            # Graphs that were captured with a smaller block keep it by their arrays.
            found = self._blocks[name] = self._device.allocate(max(byte_size, 1))
        return DeviceArray(found.address, datatype, shape, self._device.device_id, found)

    # ---- executing -------------------------------------------------------------------------------

    @abc.abstractmethod
    def _launch(self, launched: Any) -> None:
        """Enqueue a graph. Raises `CudaError`, or what the library raises."""

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, inputs: Mapping[str, DeviceArray]) -> dict[str, DeviceArray] | None:
        """Enqueue a batch with the graph for its shapes, and return its outputs; None if there is no such graph.

        The outputs are valid until the next run, when the stream has done what is enqueued. Raises `InternalError`, or
        what the library raises.
        """
        shapes = tuple((name, inputs[name].shape) for name in sorted(inputs))
        position = best_graph(self._keys, shapes)
        if position is None:
            return None
        found = self._graphs[position]
        cuda = self._device.cuda
        try:
            for name, target in found.inputs.items():
                given = inputs[name]
                cuda.enqueue_copy(target.address, given.address, given.nbytes, self._stream)
                cuda.enqueue_fill(target.address + given.nbytes, target.nbytes - given.nbytes, self._stream)
            self._launch(found.launched)
        except CudaError as error:
            end_if_lost(error)
            raise InternalError(f"unable to launch a CUDA graph for {self._name}: {error}") from None
        self._device.computes()
        self._device.keeps_outputs_in_order()
        return outputs_of_batch(found.key, inputs, found.outputs)

    def close(self) -> None:
        """Forget the graphs. Nothing may be enqueued with them."""
        self._graphs.clear()
        self._keys.clear()


def _element_total(key: GraphKey) -> int:
    return sum(element_count(shape) for _, shape in key.shapes)
