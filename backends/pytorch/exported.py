"""PT2 files: programs that `torch.export.save` writes, and libraries that AOTInductor compiles from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.pytorch.call_spec import input_names, output_names
from backends.pytorch.signature import Argument, ModelSignature
from backends.pytorch.torch_internals import compiled_loader, tree_functions
from kernel.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class ExportedRunner:
    """A program of `torch.export`, executed operation by operation. See `Runner`."""

    def __init__(self, torch: Any, path: Path, device: str | None) -> None:
        """Load the file, onto `device`, or onto the devices that it was saved with for None."""
        pytree = tree_functions()
        with path.open("rb") as file:  # a path would have to end in `.pt2`
            program = torch.export.load(file)
        if device is not None:
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        self._pytree = pytree
        self._in_spec = program.call_spec.in_spec
        self.signature = exported_signature(
            program.graph_signature.input_specs,
            pytree.treespec_dumps(self._in_spec),
            pytree.treespec_dumps(program.call_spec.out_spec),
        )
        self.changes_inputs = bool(program.graph_signature.user_inputs_to_mutate)
        self._module = program.module()

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        arguments, keywords = self._pytree.tree_unflatten(inputs, self._in_spec)
        flat: list[Any] = self._pytree.tree_leaves(self._module(*arguments, **keywords))
        return flat


class CompiledRunner:
    """A library of AOTInductor, for one kind of device. See `Runner`."""

    #: Its metadata do not say it: the library gets copies of what it must not change.
    changes_inputs = True

    def __init__(self, path: Path, device_index: int) -> None:
        """Load the file for the GPU called `device_index`, or for the CPU if it is -1."""
        self._loader = compiled_loader(path, device_index)
        in_spec, out_spec = self._loader.get_call_spec()
        self.signature = ModelSignature((), tuple(input_names(in_spec)), tuple(output_names(out_spec)))

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        outputs: list[Any] = self._loader.boxed_run(list(inputs))
        return outputs


def exported_signature(input_specs: Sequence[Any], in_spec: str, out_spec: str) -> ModelSignature:
    """Return the signature of an exported program from its `graph_signature` and its call specification.

    Raises `Unsupported` for an argument that is not a tensor: its value was fixed when the program was exported.
    """
    own = [spec for spec in input_specs if spec.kind.name == "USER_INPUT"]
    for spec in own:
        if type(spec.arg).__name__ != "TensorArgument":
            raise Unsupported(
                f"argument '{spec.arg.name}' of the exported program is not a tensor; only tensors can be inputs"
            )
    arguments = tuple(Argument(spec.arg.name, "TensorType") for spec in own)
    return ModelSignature(arguments, tuple(input_names(in_spec)), tuple(output_names(out_spec)))
