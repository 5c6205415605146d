"""A loaded PyTorch model: gathers the inputs of a batch, runs the model, scatters the outputs.

A batch of one request is not copied: the model reads the request's memory, unless it changes its inputs and the memory
belongs to a client. Texts are those of Triton's pytorch backend (model_instance_state.cc).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.batch_tensors import BatchModel, requested_outputs
from backends.pytorch.library import TORCH_ERRORS
from backends.pytorch.naming import check_result
from kernel.errors import InternalError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from backends.base import Config, Timings
    from backends.pytorch.conversion import TensorConversion
    from backends.pytorch.model_file import Runner
    from backends.pytorch.naming import Places
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.request import WorkerRequest


class TorchModel(BatchModel):
    """A model in memory, with the tensors of its configuration."""

    def __init__(
        self,
        config: Config,
        runner: Runner,
        places: Places,
        conversion: TensorConversion,
        guard: Callable[[], AbstractContextManager[Any]],
        device: InstanceDevice | None = None,
    ) -> None:
        super().__init__(config, device)
        self._runner = runner
        self._conversion = conversion
        self._guard = guard
        self._places = places
        #: The names of the arguments by their index.
        self._arguments = sorted(places.inputs, key=places.inputs.__getitem__)
        # A model with state may have counted the requests that it has seen.
        self._tries_alone = "sequence_batching" not in config

    def _infer(self, requests: Sequence[WorkerRequest], sizes: Sequence[int], timings: Timings) -> dict[str, Any]:
        with self._guard():
            inputs = self._call_inputs(self._tensors(self._gathered(requests)))
            timings.inputs_ready()
            try:
                results = self._runner.run(inputs)
            except TORCH_ERRORS as error:
                self._failed()
                raise InternalError(f"PyTorch execute failure: {error}") from error
            finally:
                timings.inferred()
            self._check_places(len(results))
            names = requested_outputs(requests, self._outputs)
            return {name: self._output(name, results[self._places.outputs[name]]) for name in names}

    def _tensors(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return name → tensor, or list of strings, of the gathered inputs. Raises `ServingError`."""
        tensor, datatypes = self._conversion.tensor, self._datatypes
        return {name: tensor(name, array, datatypes[name]) for name, array in arrays.items()}

    def _failed(self) -> None:
        """The model has raised an error."""

    def _call_inputs(self, values: Mapping[str, Any]) -> list[Any]:
        """Return what the model is called with. Raises `InvalidArgument`."""
        if self._runner.signature.takes_dictionary:
            return [values]
        try:
            return [values[name] for name in self._arguments]
        except KeyError as error:
            raise InvalidArgument(
                f"input {error} is optional in the model configuration, but the model has no default for it"
            ) from error

    def _check_places(self, count: int) -> None:
        for name, index in self._places.outputs.items():
            check_result(name, index, count)

    def _output(self, name: str, result: Any) -> Any:
        """Return an output as an array in the model's shape, on the host or on the device.

        Raises `InvalidArgument` with Triton's texts.
        """
        spec = self._outputs[name]
        provided = self._conversion.datatype(result)
        if provided != spec.datatype:
            raise InvalidArgument(
                f"configuration expects datatype TYPE_{spec.datatype} for output '{name}', model provides "
                f"TYPE_{provided}"
            )
        if provided != "BYTES" and not result.dim():
            raise InvalidArgument(f"output '{name}' is a scalar which is not supported.")
        try:
            return self._array(name, result, provided)
        except TORCH_ERRORS as error:  # an operation that was only enqueued on a GPU
            self._failed()
            raise InternalError(f"PyTorch execute failure: {error}") from error

    def _array(self, name: str, result: Any, datatype: str) -> Any:
        return self._conversion.array(result, datatype)
