"""Writes a worker's outputs to their places: the message, the worker's memory, an input, or the client's region.

The classification extension: an output's best classes instead of its values (Triton's classification.cc).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.transport import wire
from kernel.errors import InternalError, InvalidArgument, ServingError
from shm.arena import INLINE_LIMIT
from shm.arrays import NUMPY_TYPES, RAW_TYPES, to_bytes
from shm.datatypes import element_count
from shm.tensor import RequestedOutput, Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from backends.base import ModelArguments
    from backends.worker.devices.device_tensors import DeviceOutputs
    from backends.worker.held_inputs import HeldInputs
    from backends.worker.inputs import InputReader
    from backends.worker.memory import AttachedRegions
    from backends.worker.output_memory import OutputMemory
    from backends.worker.request import OutputValue, WorkerRequest
    from shm.arrays import Array

_ANY_OUTPUT = RequestedOutput("")

#: The type of an array whose bytes are the raw form of a datatype; BYTES has none.
_RAW_TYPE_OF = {name: dtype for name, dtype in NUMPY_TYPES.items() if dtype in RAW_TYPES}

_RAW_TYPE_OF["BF16"] = NUMPY_TYPES["UINT16"]

#: No array has it. `dtype == None` would be true for float64.
_NO_TYPE = np.dtype("V1")


class OutputWriter:
    """Makes tensors from output arrays. Callable from any thread."""

    def __init__(self, regions: AttachedRegions, inputs: InputReader, memory: OutputMemory, held: HeldInputs) -> None:
        self.memory = memory
        self._held = held
        self._regions = regions
        self._inputs = inputs
        self._main_thread = threading.get_ident()
        #: Whether the model's outputs have a batch dimension, and the labels of its outputs.
        self.batched = False
        self.labels: Mapping[str, Sequence[str]] = {}
        #: Writes outputs that are on a device; None for an instance without one.
        self.on_device: DeviceOutputs | None = None
        #: How many large outputs were copied to their places, and their bytes. Others were made there.
        self.copies = self.copied_byte_size = 0

    def reserve(self, request: WorkerRequest, name: str, datatype: str, shape: Sequence[int]) -> Array | None:
        requested = _requested_output(request, name)
        dtype = NUMPY_TYPES.get(datatype if datatype != "BF16" else "UINT16")
        if requested is None or requested.classification or dtype is None or dtype.hasobject:
            return None
        byte_size = element_count(shape) * dtype.itemsize
        if requested.span is not None:
            region = self._regions.find(requested.span.lease.region_number)
            if byte_size > requested.span.byte_size or (region is not None and not region.in_place):
                return None
        elif byte_size <= INLINE_LIMIT:
            return None
        self._free_reserved(request, name)
        tensor, view = self.place(name, datatype, list(shape), byte_size, requested)
        array = np.frombuffer(view, dtype=dtype).reshape(shape)
        request.reserved[name] = (array, tensor)
        return array

    def write(self, request: WorkerRequest, outputs: Sequence[OutputValue], *, pass_on: bool = False) -> list[Tensor]:
        """Write the requested outputs to their places and return their tensors.

        With `pass_on`, an output that is a part of an input in the kernel's arena may stay there, if the main thread
        responds. Raises `ServingError`; then all blocks are freed.
        """
        tensors: list[Tensor] = []
        wanted = request.ref.outputs
        try:
            for output in outputs:
                name, array = output.name, output.array
                requested = _ANY_OUTPUT
                if wanted:  # repeats `_requested_output`, to save a call for each output
                    for requested in wanted:
                        if requested.name == name:
                            break
                    else:
                        continue
                if (
                    requested.span is None
                    and array.nbytes <= INLINE_LIMIT
                    and array.dtype == _RAW_TYPE_OF.get(output.datatype, _NO_TYPE)
                    and not requested.classification
                    and not request.reserved
                ):
                    # The usual case, a small tensor, which is inline; all others take the call.
                    tensors.append(Tensor(name, output.datatype, list(array.shape), array.tobytes()))
                elif (
                    output.datatype == "BYTES"
                    and array.size == 1
                    and requested.span is None
                    and not requested.classification
                    and not request.reserved
                    and type(text := array.item()) is bytes
                    and len(text) <= INLINE_LIMIT - 4
                ):
                    # As often: a piece of a text.
                    octets = len(text).to_bytes(4, "little") + text
                    tensors.append(Tensor(name, "BYTES", list(array.shape), octets))
                else:
                    tensors.append(self._write_requested(request, output, requested, pass_on))
                    if len(wanted) > 1:
                        tensors += self._write_again(request, output, requested)
        except ServingError:
            self.free(tensors)
            raise
        self.memory.publish(tensors)
        return tensors

    def write_inputs(
        self, values: Sequence[OutputValue | Tensor], *, in_place: bool, executing: bool, on_device: bool = False
    ) -> list[Tensor]:
        """Write the inputs of a call of another model, and return their tensors. Those that are inline stay so.

        With `in_place` what is in an input or a result already stays there; `executing`: see `HeldInputs.place_of`.
        With `on_device` what is on the device stays there, where it can. Raises `ServingError`; then all blocks are
        freed.
        """
        tensors: list[Tensor] = []
        device = self.on_device
        waits = False
        try:
            for value in values:
                if isinstance(value, Tensor):
                    tensors.append(value)
                    continue
                array = value.array
                if array.nbytes <= INLINE_LIMIT and array.dtype in RAW_TYPES:  # usual: saves the calls
                    tensors.append(Tensor(value.name, value.datatype, list(array.shape), array.tobytes()))
                    continue
                if array.dtype is None:  # it is on a device
                    assert device is not None, "an input on a device, of an instance without one"
                    left = device.leave(value.name, value.datatype, array) if on_device else None
                    if left is not None:
                        waits = True
                        tensors.append(left)
                        continue
                    array = device.to_host(array)
                span = None
                if in_place and array.dtype in RAW_TYPES:
                    span = self._held.place_of(array, executing=executing)
                if span is not None:
                    tensors.append(Tensor(value.name, value.datatype, list(array.shape), None, span))
                else:
                    tensors.append(self._write_new(value.name, value.datatype, array, _ANY_OUTPUT))
            if waits and device is not None:  # inputs are complete before the call leaves
                device.wait()
        except ServingError:
            self.free(tensors)
            raise
        self.memory.publish(tensors)
        return tensors

    def _write_again(self, request: WorkerRequest, output: OutputValue, first: RequestedOutput) -> Iterator[Tensor]:
        """Write an output to its other destinations: a step of an ensemble has one for the client and one to go on."""
        for requested in request.ref.outputs:
            if requested is not first and requested.name == output.name:
                yield self._write_requested(request, output, requested, pass_on=False)

    def _write_requested(
        self, request: WorkerRequest, output: OutputValue, requested: RequestedOutput, pass_on: bool
    ) -> Tensor:
        name, datatype, array = output.name, output.datatype, output.array
        if array.dtype is None:  # it is on a device
            assert self.on_device is not None, "an output on a device, of an instance without one"
            if requested.on_device and request.reserved and name in request.reserved:
                place, tensor = request.reserved[name]
                if place.address == array.address and place.nbytes == array.nbytes:
                    del request.reserved[name]
                    tensor.shape = list(array.shape)
                    self.on_device.computed()
                    return tensor
            if not requested.classification:
                return self.on_device.write(self, name, datatype, array, requested)
            array = self.on_device.to_host(array)
        _check_type(name, datatype, array)
        if requested.classification:
            labels = self.labels.get(name, ()) if requested.labels is None else requested.labels
            batched = self.batched if requested.batched is None else requested.batched
            array = classify(array, datatype, requested.classification, labels, batched=batched)
            datatype = "BYTES"
        reserved = request.reserved.pop(name, None) if request.reserved else None
        if reserved is not None:
            place, tensor = reserved
            if array is not place and array.shape == place.shape and array.dtype == place.dtype:
                place[...] = array
                self.count(place.nbytes)
                return tensor
            if array is place:
                return tensor
            self._free_tensor(tensor)
        # Other threads of the model may still use an input after they have responded.
        if (
            pass_on
            and requested.span is None
            and array.nbytes > INLINE_LIMIT
            and threading.get_ident() == self._main_thread
        ):
            span = self._inputs.place_in_inputs(request, array)
            if span is not None:
                return Tensor(name, datatype, list(array.shape), None, span)
        return self._write_new(name, datatype, array, requested)

    def _write_new(self, name: str, datatype: str, array: Array, requested: RequestedOutput) -> Tensor:
        shape = list(array.shape)
        data = to_bytes(array)
        byte_size = len(data)
        if requested.span is None and byte_size <= INLINE_LIMIT:
            return Tensor(name, datatype, shape, bytes(data))
        check_fits(name, byte_size, requested)
        self.count(byte_size)
        wanted = requested.span
        region = None if wanted is None else self._regions.find(wanted.lease.region_number)
        if wanted is not None and region is not None:
            region.write(wanted.offset, data)
            return Tensor(name, datatype, shape, None, Span(wanted.lease, wanted.offset, byte_size))
        tensor, view = self.place(name, datatype, shape, byte_size, requested)
        view[:] = data
        return tensor

    def count(self, byte_size: int) -> None:
        """Count a copy."""
        self.copies += 1
        self.copied_byte_size += byte_size

    def place(
        self, name: str, datatype: str, shape: list[int], byte_size: int, requested: RequestedOutput
    ) -> tuple[Tensor, memoryview]:
        """Return the tensor of an output that is not inline, and its bytes, which the caller fills."""
        wanted = requested.span
        region = None if wanted is None else self._regions.find(wanted.lease.region_number)
        if wanted is None or region is None:  # without shared memory the kernel copies it to the client's region
            span, view = self.memory.take(byte_size)
        else:
            span = Span(wanted.lease, wanted.offset, byte_size)
            view = region.view(wanted.offset, byte_size)
        return Tensor(name, datatype, shape, None, span), view

    def copied(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors, with those that are in inputs replaced by copies. Raises `ServingError`."""
        copies: list[Tensor] = []
        for tensor in tensors:
            span = tensor.span
            if span is None or self._owns(span) or not self._regions.get(span.lease.region_number).shared:
                copies.append(tensor)
                continue
            copy, view = self.place(tensor.name, tensor.datatype, tensor.shape, span.byte_size, _ANY_OUTPUT)
            self.count(span.byte_size)
            view[:] = self._regions.get(span.lease.region_number).view(span.offset, span.byte_size)
            copies.append(copy)
        return copies

    # ---- freeing -----------------------------------------------------------------------------

    def free(self, tensors: Sequence[Tensor]) -> None:
        """Free the memory of outputs that are not sent."""
        if self.on_device is not None and self.on_device.pending:
            self.on_device.wait()  # a device may still write to pinned memory
        for tensor in tensors:
            self._free_tensor(tensor)

    def free_reserved(self, request: WorkerRequest) -> None:
        """Free reserved memory that was not used."""
        for name in list(request.reserved):
            self._free_reserved(request, name)

    def _free_reserved(self, request: WorkerRequest, name: str) -> None:
        reserved: tuple[Any, Tensor] | None = request.reserved.pop(name, None)
        if reserved is not None:
            self._free_tensor(reserved[1])

    def _free_tensor(self, tensor: Tensor) -> None:
        span = tensor.span
        if span is None:
            return
        if self.memory.owns(span):
            self.memory.drop(span)
        elif self._owns(span):
            assert self.on_device is not None, "an output on a device, of an instance without one"
            self.on_device.drop(span)

    def _owns(self, span: Span) -> bool:
        """Whether a tensor is in an arena of this worker, on the host or on a device."""
        return self.memory.owns(span) or span.lease.region_number < wire.OUTPUT_ARENA


def check_fits(name: str, byte_size: int, requested: RequestedOutput) -> None:
    """Raises `InternalError` if the span in a client's region is too small for the output."""
    if requested.span is not None and byte_size > requested.span.byte_size:
        raise InternalError(
            f"shared memory size specified with the request for output '{name}' ({requested.span.byte_size} bytes) "
            f"should be at least {byte_size} bytes to hold the results"
        )


def _requested_output(request: WorkerRequest, name: str) -> RequestedOutput | None:
    """Return the request's entry for an output, or None if the request names only other outputs."""
    if not request.ref.outputs:
        return _ANY_OUTPUT
    for output in request.ref.outputs:
        if output.name == name:
            return output
    return None


def _check_type(name: str, datatype: str, array: Array) -> None:
    """Raise `InternalError` if the bytes of `array` are no values of `datatype`: the client would read wrong values."""
    dtype = _RAW_TYPE_OF.get(datatype)
    if dtype is not None and (array.dtype.itemsize != dtype.itemsize or array.dtype.hasobject):
        raise InternalError(f"output '{name}' has the datatype {datatype}, and its array is of {array.dtype}")


#: Larger outputs are refused, as Triton does since 2026-01.
MAX_ELEMENTS = 1_000_000

_UNSUPPORTED = ("FP16", "BF16", "BOOL", "BYTES")


def classify(array: Array, datatype: str, count: int, labels: Sequence[str], *, batched: bool) -> Array:
    """Return the `count` best classes of each row as BYTES elements `value:index[:label]`.

    The result has shape [rows, min(count, classes)], or [min(count, classes)] if the model does not batch.
    Raises `InvalidArgument` for datatypes that Triton does not classify and for very large outputs.
    """
    if datatype in _UNSUPPORTED:
        raise InvalidArgument(f"class result not available for output due to unsupported type '{datatype}'")
    if array.size > MAX_ELEMENTS:
        raise InvalidArgument("classification output tensor too large")
    rows = array.reshape(array.shape[0], -1) if batched else array.reshape(1, -1)
    class_count = min(count, rows.shape[1])
    best = np.argsort(-rows if rows.dtype.kind == "f" else ~rows, axis=1, kind="stable")[:, :class_count]
    value_format = "{:f}" if array.dtype.kind == "f" else "{:d}"
    result = np.empty((rows.shape[0], class_count), dtype=object)
    for row, order in enumerate(best.tolist()):
        for rank, index in enumerate(order):
            text = f"{value_format.format(rows[row, index].item())}:{index}"
            if index < len(labels) and labels[index]:
                text += f":{labels[index]}"
            result[row, rank] = text.encode()
    return result if batched else result.reshape(class_count)


def read_labels(path: Path) -> list[str]:
    """Return the labels, one from each line, without surrounding white space."""
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]


def labels_of(arguments: ModelArguments) -> dict[str, list[str]]:
    """Return the labels, by output, of the outputs with a label file in the model's folder."""
    return {
        output["name"]: read_labels(arguments.model_dir / output["label_filename"])
        for output in arguments.config.get("output", [])
        if output.get("label_filename")
    }
