"""Batching rules of packages: which requests may join a batch, beyond what the dynamic batcher decides itself.

These are the five functions of Triton's custom batching (`TRITONBACKEND_ModelBatch...` in tritonbackend.h) as methods
of a Python class. A package adds one with an entry point of the group `naiad.batching`; a model chooses it with the
parameter `naiad.batching` (docs/batching.md).
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from kernel.errors import InternalError
from kernel.extensions import BATCHING_RULES, extension

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.serving.request import Request


class BatchingRule(abc.ABC):
    """The rule of one model version. The kernel calls it while it makes batches, so every method must be quick.

    A method that raises ends the scheduler: the queued requests fail with the error, and a new scheduler starts, with
    a new rule.
    """

    def __init__(self, spec: ModelSpec) -> None:
        """Called when the scheduler starts. `spec.parameters` are the parameters of the model's configuration."""
        self.spec = spec

    def finalize(self) -> None:  # noqa: B027 - most rules have nothing to free
        """Called when the scheduler ends."""

    def initialize_batch(self) -> Any:
        """Called before the first request of a possible batch. Returns what the other methods get as `batch`."""
        return None

    @abc.abstractmethod
    def include_request(self, request: Request, batch: Any) -> bool:
        """Whether `request` may join the batch, after those that were included before. It must not be changed.

        Its parameters and the names, shapes and byte sizes of its tensors can be read, but not always the tensors'
        bytes. Called for each request of the batch, also for the first one, which is executed alone if it is not
        included. A batch that was not dispatched yet is formed again when more requests have come.
        """

    def finalize_batch(self, batch: Any) -> None:  # noqa: B027 - most rules have nothing to free
        """Called when this batch is complete: no more requests are offered to it."""


def batching_rule(spec: ModelSpec) -> BatchingRule | None:
    """Return the rule that the model names, None if it names none. Raises `ServingError`."""
    if not spec.batching_rule:
        return None
    found = extension(BATCHING_RULES, spec.batching_rule)
    if not (isinstance(found, type) and issubclass(found, BatchingRule)):
        raise InternalError(
            f"batching rule '{spec.batching_rule}' must be a subclass of schedulers.batching_rules.BatchingRule; "
            f"found {found!r}"
        )
    return found(spec)
