"""TorchScript files, which `torch.jit.save` writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.pytorch.signature import Argument, ModelSignature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


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
