"""The task of helpers that hashes large inputs for the response cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.cache.key import digest
from kernel.serving.helper_tasks import TaskResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskSteps

#: The name of the function.
DIGEST = "cache.digest"


def digest_task(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    """Return the key of a request: `arguments` is its description, `sources` are its inputs."""
    yield from ()  # a task function is a generator, and this one needs no memory
    return TaskResult(digest(arguments, sources))
