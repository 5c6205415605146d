"""What a dialect is: how the requests of clients become inputs of a model. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.config.spec import TensorSpec

#: The input with the prompt, in the dialects of models that take no messages.
TEXT_INPUT = "text_input"


class Dialect(Protocol):
    """How one model is spoken to."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def output(self) -> str:
        """The output with the text, or with chunks and bodies that the model has made itself."""

    @property
    def ready(self) -> bool:
        """Whether the model makes its responses itself. Then it gets one request for all choices."""

    @property
    def chats(self) -> bool:
        """Whether the model takes messages of a chat."""

    @property
    def honoured(self) -> frozenset[str]:
        """The fields that reach the model, of those that are its matter, and parts of messages that it takes."""

    @property
    def reason(self) -> str:
        """Why it does not honour others, as the end of a sentence."""

    def inputs(self, fields: dict[str, Any]) -> list[Tensor]:
        """Return the inputs of a request with these checked fields. Raises `ApiError`."""


def input_shape(spec: TensorSpec, count: int = 1) -> list[int]:
    """Return the shape of an input with `count` elements in its last dimension: one row, where the model batches."""
    return [*(1 for _ in spec.shape[:-1]), count]


def texts_tensor(spec: TensorSpec, texts: Sequence[str | bytes]) -> Tensor:
    """Return an input of BYTES with these elements."""
    elements = [text.encode() if isinstance(text, str) else text for text in texts]
    data = b"".join(len(each).to_bytes(4, "little") + each for each in elements)
    return Tensor(spec.name, "BYTES", input_shape(spec, len(elements)), data)


def switch_tensor(spec: TensorSpec, *, on: bool) -> Tensor:
    """Return an input of BOOL."""
    return Tensor(spec.name, "BOOL", input_shape(spec), bytes([on]))
