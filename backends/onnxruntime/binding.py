"""One run of a session: inputs used in place, outputs written to their places where those are known.

A plain run costs half of one whose memory is bound anew (4.5 against 8 µs for an add_sub), and takes inputs
in place too; so that is done only for outputs that have a place, and for BF16, which numpy lacks. Memory that is
bound once and stays costs least (2 µs), but has to be copied to (`small.py`).
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort

from backends.onnxruntime.errors import ORT_ERRORS, onnx_error
from backends.onnxruntime.options import CPU_PROVIDER
from kernel.errors import InvalidArgument
from shm.datatypes import element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.onnxruntime.tensors import OnnxSignature
    from shm.arrays import Array

#: onnx.TensorProto.BFLOAT16
_BFLOAT16 = 16


class BoundSession:
    """Runs a session with and without bound memory. Not safe for use from several threads."""

    def __init__(
        self, session: ort.InferenceSession, run_options: ort.RunOptions | None, signature: OnnxSignature
    ) -> None:
        self._session = session
        self._run_options = run_options
        self._binding = session.io_binding()
        #: Whether the CPU alone computes, so that what is bound is used in place.
        self.on_cpu = session.get_providers() == [CPU_PROVIDER]
        self._strings = signature.uses_strings
        tensors = {**signature.inputs, **signature.initializers, **signature.outputs}
        self._bf16 = {name for name, tensor in tensors.items() if tensor.datatype == "BF16"}
        #: Whether outputs may be given places: not for models with strings, that cannot be bound, and
        #: not once an output had another shape than the model file declares.
        self.takes_places = not self._strings

    def run(self, inputs: Mapping[str, Array], names: Sequence[str], places: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs called `names`, computed from `inputs`.

        An output that is in `places` is written there if it has exactly that shape, and the place is
        returned. BYTES are object arrays: of bytes in inputs, of str in outputs; BF16 is uint16. Arrays
        returned are the session's own memory or a place, and stay valid. Raises `InternalError` with
        ONNX Runtime's reason, and `InvalidArgument` for strings that are not UTF-8.
        """
        if not places:
            return self._run(inputs, names)
        try:
            return self._run_bound(inputs, names, places)
        except ORT_ERRORS:
            # Either the inputs are at fault: then a run without places says so, with ONNX Runtime's code.
            # Or the model file declares wrong output shapes: then it succeeds.
            outputs = self._run(inputs, names)
            self.takes_places = False
            return outputs

    def bound(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        """Return what computes `outputs`, where they are, from `inputs`, as often as it is called: with a CPU only.

        The arrays are C-ordered, of the types that `run` says but no strings, and must outlive the result. It
        raises ONNX Runtime's own errors (`ORT_ERRORS`), also where an output has another shape.
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
                inputs = {name: _decoded(name, array) for name, array in inputs.items()}
            outputs = self._session.run(names, inputs, self._run_options)
        except ORT_ERRORS as error:
            raise onnx_error(error) from error
        return dict(zip(names, outputs, strict=True))

    def _run_bound(
        self, inputs: Mapping[str, Array], names: Sequence[str], places: Mapping[str, Array]
    ) -> dict[str, Array]:
        binding = self._binding
        try:
            for name, array in inputs.items():
                binding.bind_ortvalue_input(name, self._value(name, array))
            for name in names:
                if name in places:
                    binding.bind_ortvalue_output(name, self._value(name, places[name]))
                else:
                    binding.bind_output(name)
            self._session.run_with_iobinding(binding, self._run_options)
            found = zip(names, binding.get_outputs(), strict=True)
            return {name: places[name] if name in places else self._array(name, value) for name, value in found}
        finally:
            # Bound memory belongs to requests, and is gone when they are answered.
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


def _decoded(name: str, array: Array) -> Array:
    """Return strings as ONNX Runtime wants them; other arrays as they are."""
    if array.dtype != object:
        return array
    strings = np.empty(array.size, dtype=object)
    try:
        strings[:] = [element.decode() for element in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"input '{name}' has a string that is not UTF-8: {error}") from error
    return strings.reshape(array.shape)
