"""A loaded TensorRT model: gathers the inputs of a batch on the device, enqueues the engine, scatters the outputs.

Everything is enqueued on the stream of the instance, and waited for once for each batch.

The values of a shape tensor for a batch: integers that say shapes, which TensorRT reads on the host. Pure.

Rules and texts are those of Triton's TensorRT backend: the scheduler puts only requests with equal values into one
batch, and if the model batches, the first value is the number of rows of the whole batch, which requests may leave out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from backends.batch_tensors import BatchModel, requested_outputs
from backends.tensorrt.context import EngineContext, OutputBlocks
from backends.tensorrt.graphs import EngineGraphs
from backends.tensorrt.profiles import check_fits, choose_profile, instance_profiles
from backends.worker.devices.graph_specs import graph_specs, has_ignored_lower_bounds
from backends.worker.devices.tensors import DeviceArray
from backends.worker.sequence_config import state_outputs
from kernel.errors import InternalError, InvalidArgument
from shm.arrays import NUMPY_TYPES
from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.base import ModelArguments, Timings
    from backends.tensorrt.library import TensorRt
    from backends.tensorrt.plan import Plan
    from backends.tensorrt.settings import EngineSettings
    from backends.tensorrt.signature import EngineSignature, EngineTensor, Profile
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array


class LoadedEngine(BatchModel):
    """An engine with a context for each profile of the instance, and its CUDA graphs."""

    def __init__(
        self,
        tensorrt: TensorRt,
        plan: Plan,
        signature: EngineSignature,
        arguments: ModelArguments,
        settings: EngineSettings,
        device: InstanceDevice,
    ) -> None:
        """Raises `ServingError` if a context cannot be created, or a profile is not the engine's."""
        config = arguments.config
        super().__init__(config, device)
        self._tensorrt = tensorrt
        self._plan = plan
        self._signature = signature
        self._device: InstanceDevice = device
        self._name = arguments.instance_name
        #: Implicit state is kept on the host.
        self._states = {spec.name for spec in state_outputs(config)}
        self._shape_inputs = [name for name, tensor in signature.inputs.items() if tensor.is_shape_tensor]
        self._scalars = [name for name, tensor in signature.inputs.items() if not tensor.dims]
        self._stream = device.stream
        if settings.priority:
            cuda = device.cuda
            #: It lives as long as the process.
            self._own_stream = cuda.new_stream_of_priority(device.device_id, high=settings.priority == "high")
            self._stream = int(self._own_stream)
        self._blocks = OutputBlocks(device)
        #: Whether a batch may be enqueued while the one before is computed. Tensors on the host are read and written
        #: where they are.
        self.overlaps = not (
            signature.has_shape_tensors
            or self._states
            or any(tensor.on_host for tensor in (*signature.inputs.values(), *signature.outputs.values()))
        )
        self._names: list[tuple[str, Profile]] = []
        self._contexts: list[EngineContext] = []
        self._graphs: list[EngineGraphs] = []
        for name, index in instance_profiles(config, self._name, len(signature.profiles)):
            profile = signature.profiles[index]
            self._names.append((name, profile))
            self._contexts.append(self._context(profile, settings.allocation_strategy))
        self._allocate_outputs()

    # ---- loading ---------------------------------------------------------------------------------

    def _context(self, profile: Profile, strategy: str) -> EngineContext:
        strategies = self._tensorrt.module.ExecutionContextAllocationStrategy
        context = self._plan.engine.create_execution_context(getattr(strategies, strategy))
        if context is None:
            raise InternalError(f"unable to create TensorRT context: {self._tensorrt.log.take_errors()}")
        # The first context of an engine has profile 0. For the others the profile must be set.
        if (profile.index or self._contexts) and not context.set_optimization_profile_async(
            profile.index, self._stream
        ):
            raise InternalError(
                f"unable to set optimization profile {profile.index} for {self._name}: "
                f"{self._tensorrt.log.take_errors()}"
            )
        self._wait_for_own_stream()
        self._device.synchronize()
        return EngineContext(self._tensorrt, context, self._signature, profile, self._device, self._blocks, self._name)

    def _wait_for_own_stream(self) -> None:
        if self._stream != self._device.stream:
            self._device.after(self._stream)

    def _allocate_outputs(self) -> None:
        """Allocate the outputs of the largest batch now, so that a device without memory fails the load.

        Batches overlap only if there is memory for the outputs of two.
        """
        if self._signature.has_shape_tensors:
            return
        sizes: dict[str, int] = {}
        for context in self._contexts:
            largest = {name: self._largest(name, extent.maximum) for name, extent in context.profile.dims.items()}
            for name, shape in context.output_shapes(largest, {}).items():
                if -1 not in shape:
                    datatype = self._signature.tensors[name].datatype
                    byte_size = element_count(shape) * DATATYPES[datatype].byte_size
                    self._blocks.block(name, byte_size)
                    sizes[name] = max(byte_size, sizes.get(name, 0))
        try:
            for name, byte_size in sizes.items():
                if self.overlaps:
                    self._blocks.other_block(name, byte_size)
        except InternalError:
            self.overlaps = False

    def _largest(self, name: str, maximum: tuple[int, ...]) -> tuple[int, ...]:
        """Return the largest shape of an input: as in the profile, with no more rows than the model takes."""
        spec = self._inputs.get(name)
        if spec is None or not spec.batched or spec.ragged or not maximum:
            return maximum
        return (min(maximum[0], self._max_batch_size), *maximum[1:])

    def capture_graphs(self, arguments: ModelArguments, warn: Callable[[str], None]) -> None:
        """Capture the CUDA graphs of the configuration. `warn` is called for each that cannot be captured.

        Raises `InvalidArgument` for wrong specifications.
        """
        specs = graph_specs(arguments.config)
        if not specs:
            return
        if has_ignored_lower_bounds(specs):
            warn(
                f"graph_lower_bound for {self._name} is used for the batch size only: other dimensions must be as "
                "in the graph"
            )
        for _, profile in self._names:
            graphs = EngineGraphs(
                self._tensorrt, self._plan.engine, self._signature, profile, self._device, self._name, self._stream,
                batched=self._max_batch_size > 0,
            )  # fmt: skip
            graphs.capture(specs, warn)
            self._graphs.append(graphs)

    @property
    def graph_count(self) -> int:
        return sum(map(len, self._graphs))

    # ---- executing -------------------------------------------------------------------------------

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """As `BatchModel.execute`."""
        super().execute(requests, timings)
        if not self.overlaps:  # else the worker waits
            # One wait for the computation and for the copies of outputs: until it ends the statistics count inference.
            self._device.synchronize()
        timings.inferred()

    def _infer(self, requests: Sequence[WorkerRequest], sizes: Sequence[int], timings: Timings) -> dict[str, Any]:
        row_count, batched = sum(sizes), self._max_batch_size > 0
        values = {
            name: shape_values(requests[0], name, self._signature.tensors[name], row_count, batched)
            for name in self._shape_inputs
        }
        inputs = self._gathered(requests)
        shapes = {name: array.shape for name, array in inputs.items()}
        numbers = {name: array.reshape(-1).tolist() for name, array in values.items()}
        position = choose_profile(self._names, shapes, numbers)
        check_fits(self._names[position][1], shapes, numbers, self._name)
        timings.inputs_ready()
        if self._stream != self._device.stream:
            self._device.before(self._stream)
        arrays: dict[str, Any] | None = self._graphs[position].run(inputs) if self._graphs else None
        if arrays is None:
            place = self._placer(requests[0]) if len(requests) == 1 else _anywhere
            arrays = self._contexts[position].run(inputs, values, place, self._stream)
        self._wait_for_own_stream()
        return {name: self._output(name, arrays[name]) for name in requested_outputs(requests, self._outputs)}

    def _gathered(self, requests: Sequence[WorkerRequest]) -> dict[str, DeviceArray]:
        """Return the inputs on the device, in the engine's shapes; without shape tensors."""
        gathered = super()._gathered(requests)
        found = {name: array for name, array in gathered.items() if name not in self._shape_inputs}
        self._device.keep((gathered, found))
        for name in self._scalars:
            if name in found:
                found[name] = found[name].reshape(())
        return found

    def _output(self, name: str, array: DeviceArray | Array) -> DeviceArray | Array:
        if not array.ndim and not self._outputs[name].batched:
            array = array.reshape(self._outputs[name].model_dims)  # a scalar is configured as one element
        if name in self._states and isinstance(array, DeviceArray):
            return self._device.to_host(array)
        return array

    def _placer(self, request: WorkerRequest) -> Callable[[str, str, tuple[int, ...]], DeviceArray | None]:
        """Return what finds the places of a single request's outputs in regions of its client on this device."""

        def place(name: str, datatype: str, shape: tuple[int, ...]) -> DeviceArray | None:
            spec = self._outputs[name]
            if spec.reshape is not None or spec.shaped_like is not None or name in self._states:
                return None
            return self._device.reserve(request, name, datatype, shape)

        return place

    def close(self) -> None:
        """Free what the instance has on the device. Nothing may be in execution."""
        for graphs in self._graphs:
            graphs.close()
        self._graphs.clear()
        self._contexts.clear()
        self._plan.close()


def _anywhere(name: str, datatype: str, shape: tuple[int, ...]) -> None:
    """Return no place: the outputs of several requests are in one block."""


def shape_values(request: WorkerRequest, name: str, tensor: EngineTensor, row_count: int, batched: bool) -> Array:
    """Return the values for a batch of `row_count` rows whose first request is `request`, in the engine's shape.

    Raises `InvalidArgument` for a wrong number of values, `InternalError` if there are none.
    """
    view = request.input(name)
    if view is None:
        raise InternalError(f"unable to find shape values for shape input '{name}' in request")
    data = view.raw()
    dtype = NUMPY_TYPES[tensor.datatype]
    expected = tensor.dims[0] if tensor.dims and tensor.dims[0] >= 0 else None
    given = np.frombuffer(data, dtype) if len(data) % dtype.itemsize == 0 else None
    if given is not None and batched and len(view.shape) > 1 and view.shape[0]:
        given = given[: len(given) // view.shape[0]]  # each row has the values
    if given is not None and batched and (expected is None or len(given) == expected - 1):
        given = np.concatenate([np.array([row_count], dtype), given])
    elif given is not None and batched and len(given) == expected:
        given = np.concatenate([np.array([row_count], dtype), given[1:]])
    if given is None or (expected is not None and len(given) != expected):
        count = 1 if expected is None else expected - int(batched)
        more = f" [ or {(count + 1) * dtype.itemsize} if input includes batch shape value] " if batched else ""
        raise InvalidArgument(
            f"shape tensor for input '{name}' expected byte size is {count * dtype.itemsize}{more}, got {len(data)}"
        )
    array: Array = given.copy()
    return array.reshape(()) if not tensor.dims else array
