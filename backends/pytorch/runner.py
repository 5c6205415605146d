"""What a loaded model file offers, whichever format it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.pytorch.signature import ModelSignature


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
