"""What a model file says of the inputs and outputs of its model, whichever format it has."""

from __future__ import annotations

import msgspec


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
