"""Finds a model's file and says which of PyTorch's formats it has. Only names inside the file are read.

A file is not judged by its name: as in Triton, `model.pt2` is used where there is no `model.pt`, and either may be
TorchScript. All formats are zip archives.

What a model file says of the inputs and outputs of its model, whichever format it has.

What a loaded model file offers, whichever format it has.

TorchScript files, which `torch.jit.save` writes.

PT2 files: programs that `torch.export.save` writes, and libraries that AOTInductor compiles from them.
"""

from __future__ import annotations

import enum
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from backends.pytorch.library import compiled_loader, tree_functions, without_pickles
from backends.pytorch.naming import input_names, output_names
from kernel.errors import InternalError, InvalidArgument, Unavailable, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from backends.base import ModelArguments

_DEFAULT, _SECOND = "model.pt", "model.pt2"


class FileFormat(enum.Enum):
    """What a file was written with."""

    TORCHSCRIPT = "torch.jit.save"
    EXPORTED = "torch.export.save"
    COMPILED = "torch._inductor.aoti_compile_and_package"


def find_model_file(arguments: ModelArguments, capability: tuple[int, int] | None = None) -> Path:
    """Return the path of the version's model file, for a GPU with this compute capability.

    Raises `InvalidArgument` for a name that leads out of the model's folder, and `Unavailable` with Triton's text if
    the file does not exist.
    """
    path = arguments.model_file(_DEFAULT, capability)
    if not path.is_file() and path.name == _DEFAULT:
        second = path.with_name(_SECOND)
        path = second if second.is_file() else path
    # Only the name is checked: the owner of the repository may link to files outside.
    path = Path(os.path.normpath(path))
    if not path.is_relative_to(os.path.normpath(arguments.model_dir)):
        raise InvalidArgument(f"model file '{path}' is outside the folder of model '{arguments.model_name}'")
    if not path.is_file():
        raise Unavailable(f"unable to find '{path}' for model instance '{arguments.model_name}'")
    return path


def read_format(path: Path, model: str) -> FileFormat:
    """Return the format of a model file. Raises `InternalError` or `Unsupported` if the file cannot be served."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise InternalError(
            f"failed to load model '{model}': '{path.name}' is neither TorchScript (torch.jit.save) nor an exported "
            f"program (torch.export.save): {error}"
        ) from error
    return format_of(names, path.name, model)


def format_of(names: Collection[str], file: str, model: str) -> FileFormat:
    """Return the format of an archive with these members; all of them are in one folder, whose name has no meaning.

    Raises `Unsupported` for pickles, and for archives of another kind.
    """
    inner = {name.partition("/")[2] for name in names}
    if any(name.startswith("data/aotinductor/") for name in inner):
        return FileFormat.COMPILED
    if "archive_format" in inner or "serialized_exported_program.json" in {*names, *inner}:
        return FileFormat.EXPORTED
    if "constants.pkl" in inner:
        return FileFormat.TORCHSCRIPT
    if "data.pkl" in inner:
        raise Unsupported(
            f"failed to load model '{model}': '{file}' was written by torch.save. It has weights or a pickle of Python "
            "objects, not a model. Write it with torch.export.save(torch.export.export(model, arguments), file) or "
            "torch.jit.script(model).save(file)"
        )
    raise Unsupported(
        f"failed to load model '{model}': '{file}' is an archive, but not of torch.jit.save or torch.export.save"
    )


class Argument(msgspec.Struct, frozen=True):
    """One argument of the method `forward` of a TorchScript model."""

    name: str
    #: The kind of its type, as PyTorch calls it: `TensorType`, `ListType`, `DictType`, ...
    kind: str
    #: The whole type, for error texts.
    type_name: str = "Tensor"


class ModelSignature(msgspec.Struct, frozen=True):
    """The inputs and outputs of a model, in the order in which they are passed and returned."""

    #: The arguments without `self`. Empty if the file does not name them.
    arguments: tuple[Argument, ...] = ()
    #: The paths of the inputs in the call (`call_spec.py`); None in TorchScript files.
    input_paths: tuple[str, ...] | None = None
    #: The paths of the outputs in what the call returns; None in TorchScript files, which do not say how many there
    #: are.
    output_paths: tuple[str, ...] | None = None

    @property
    def takes_dictionary(self) -> bool:
        """Whether the only argument is a dictionary: the names of inputs are its keys."""
        return len(self.arguments) == 1 and self.arguments[0].kind == "DictType"


class Runner(Protocol):
    """A model in memory. Not thread-safe."""

    #: Its inputs and outputs.
    signature: ModelSignature
    #: Whether it may change its inputs, which then must not be memory of clients.
    changes_inputs: bool

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Compute and return all outputs: tensors, and lists of strings.

        `inputs` are tensors and lists of strings in the order of the signature, or one dictionary of tensors if it
        takes one. Raises what PyTorch raises (`TORCH_ERRORS`), and `ValueError` for results that are not tensors.
        """


class TorchScriptRunner:
    """A TorchScript model. See `Runner`."""

    def __init__(self, torch: Any, path: Path, device: str | None) -> None:
        """Load the file, onto `device`, or onto the devices that it was saved with for None."""
        self._module = torch.jit.load(str(path), map_location=device)
        self._is_tensor: Callable[[Any], bool] = torch.is_tensor
        self.signature = _signature(self._module)
        self.changes_inputs = _writes(self._module.inlined_graph)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        return flat_results(self._module(*inputs), self._is_tensor)


def _signature(module: Any) -> ModelSignature:
    arguments = module.forward.schema.arguments
    # The first one is the module itself.
    own = arguments[1:] if arguments and arguments[0].type.kind() == "ClassType" else arguments
    return ModelSignature(tuple(Argument(each.name, each.type.kind(), each.type.str()) for each in own))


def _writes(graph: Any) -> bool:
    """Whether an operation of the graph changes a tensor in place: its schema has a `!`, as in `Tensor(a!) self`.

    Which tensor this is, only PyTorch's own analysis could tell. It is not exposed.
    """
    return any("!" in node.schema() for node in _nodes(graph))


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def flat_results(result: Any, is_tensor: Callable[[Any], bool]) -> list[Any]:
    """Return what a TorchScript model has returned as a list of tensors and lists of strings.

    Raises `ValueError` with Triton's text for other values.
    """
    if isinstance(result, tuple):
        return [_element(index, element, is_tensor) for index, element in enumerate(result)]
    if is_tensor(result):
        return [result]
    if isinstance(result, list):
        if not _are_strings(result):
            raise ValueError(f"output must be of type Tensor or List[str], received List[{_type_name(result)}]")
        return [result]
    raise ValueError(
        "output must be of type Tensor, List[str] or Tuple containing one of these two types. It should not be a List "
        "/ Dictionary of Tensors or a Scalar"
    )


def _element(index: int, element: Any, is_tensor: Callable[[Any], bool]) -> Any:
    if isinstance(element, list):
        if not _are_strings(element):
            raise ValueError(
                f"output at index {index} must be of type Tensor or List[str], received List[{_type_name(element)}]"
            )
    elif not is_tensor(element):
        raise ValueError(f"Expected Tensor but got {type(element).__name__}")
    return element


def _are_strings(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _type_name(values: list[Any]) -> str:
    return type(values[0]).__name__


def load_exported(torch: Any, path: Path) -> Any:
    """Return the program in a file of `torch.export.save`. Nothing in the file is executed.

    Raises what PyTorch raises, and `pickle.UnpicklingError` if the file has pickles of other things than tensors.
    """
    with path.open("rb") as file, without_pickles():  # a path would have to end in `.pt2`
        return torch.export.load(file)


class ExportedRunner:
    """A program of `torch.export`, executed operation by operation. See `Runner`."""

    def __init__(self, torch: Any, path: Path, device: str | None) -> None:
        """Load the file, onto `device`, or onto the devices that it was saved with for None."""
        pytree = tree_functions()
        program = load_exported(torch, path)
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
