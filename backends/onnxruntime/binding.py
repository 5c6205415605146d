"""Runs a session on the memory of inputs, and writes outputs to their destinations if these are known.

A plain run takes half the time of a run with newly bound memory (4.5 against 8 µs for an add_sub), and it also reads
inputs in place. So memory is bound only for outputs with a destination, and for BF16, which NumPy lacks. A run with
memory that stays bound is fastest (2 µs), but inputs must be copied there (`small_batches.py`).
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort

from backends.onnxruntime.providers import CPU_PROVIDER
from backends.onnxruntime.session import ORT_ERRORS, onnx_error
from kernel.errors import InvalidArgument
from shm.datatypes import element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.onnxruntime.signature import OnnxSignature
    from shm.arrays import Array

#: onnx.TensorProto.BFLOAT16
_BFLOAT16 = 16


class BoundSession:
    """Runs a session with and without bound memory. Not thread-safe."""

    def __init__(
        self, session: ort.InferenceSession, run_options: ort.RunOptions | None, signature: OnnxSignature
    ) -> None:
        self._session = session
        self._run_options = run_options
        self._binding = session.io_binding()
        #: The session computes only on the CPU, so it uses bound memory in place.
        self.on_cpu = session.get_providers() == [CPU_PROVIDER]
        self._strings = signature.uses_strings
        tensors = {**signature.inputs, **signature.initializers, **signature.outputs}
        self._bf16 = {name for name, tensor in tensors.items() if tensor.datatype == "BF16"}
        #: False if the model has strings, which cannot be bound, and after an output had another shape than the model
        #: file declares.
        self.accepts_destinations = not self._strings

    def run(
        self, inputs: Mapping[str, Array], names: Sequence[str], destinations: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Compute and return the outputs called `names`: name → array.

        If `destinations` has an array for an output, in exactly the output's shape, the output is written to it, and
        this array is returned. Other arrays are memory of the session; they stay valid. BYTES are object arrays, of
        `bytes` for inputs and `str` for outputs; BF16 is uint16. Raises `InternalError` with ONNX Runtime's reason,
        and `InvalidArgument` for strings that are not UTF-8.
        """
        if not destinations:
            return self._run(inputs, names)
        try:
            return self._run_bound(inputs, names, destinations)
        except ORT_ERRORS:
            # If the inputs are wrong, a run without destinations raises the error, with ONNX Runtime's code.
            # If the model file declares wrong output shapes, it succeeds.
            outputs = self._run(inputs, names)
            self.accepts_destinations = False
            return outputs

    def bound(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        """Return a function that computes `outputs` from `inputs`, in place; it can be called repeatedly. CPU only.

        The arrays are C-ordered, with the types of `run` but without strings, and must live as long as the function.
        The function raises ONNX Runtime's own errors (`ORT_ERRORS`), also if an output has another shape.
        """
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, self._value(name, array))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, self._value(name, array))
        return functools.partial(self._session.run_with_iobinding, binding, self._run_options)

    def _run(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        try:
            if self._bf16:
                return self._run_bound(inputs, names, {})
            if self._strings:
                inputs = {name: decoded(name, array) for name, array in inputs.items()}
            outputs = self._session.run(names, inputs, self._run_options)
        except ORT_ERRORS as error:
            raise onnx_error(error) from error
        return dict(zip(names, outputs, strict=True))

    def _run_bound(
        self, inputs: Mapping[str, Array], names: Sequence[str], destinations: Mapping[str, Array]
    ) -> dict[str, Array]:
        binding = self._binding
        try:
            for name, array in inputs.items():
                binding.bind_ortvalue_input(name, self._value(name, array))
            for name in names:
                if name in destinations:
                    binding.bind_ortvalue_output(name, self._value(name, destinations[name]))
                else:
                    binding.bind_output(name)
            self._session.run_with_iobinding(binding, self._run_options)
            found = zip(names, binding.get_outputs(), strict=True)
            return {
                name: destinations[name] if name in destinations else self._array(name, value) for name, value in found
            }
        finally:
            # Bound memory belongs to requests; it may be reused after their responses.
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()

    def _value(self, name: str, array: Array) -> ort.OrtValue:
        """Return a value that shares the array's memory."""
        if name in self._bf16:
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)
        return ort.OrtValue.ortvalue_from_numpy(array)

    def _array(self, name: str, value: ort.OrtValue) -> Array:
        if name not in self._bf16:
            array: Array = value.numpy()
            return array
        shape = value.shape()
        memory = (ctypes.c_uint16 * element_count(shape)).from_address(value.data_ptr())
        return np.ctypeslib.as_array(memory).reshape(shape).copy()


def decoded(name: str, array: Array) -> Array:
    """Return an array of `bytes` as an array of `str`, which ONNX Runtime needs; return other arrays unchanged."""
    if array.dtype != object:
        return array
    strings = np.empty(array.size, dtype=object)
    try:
        strings[:] = [element.decode() for element in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"input '{name}' has a string that is not UTF-8: {error}") from error
    return strings.reshape(array.shape)
