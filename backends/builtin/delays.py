"""Parameters of models that make example backends slow, for tests. Names and meanings are those of Triton's identity.

creation_delay_sec              how long a load takes, in seconds
execute_delay_ms                how long an execution takes, in milliseconds
instance_wise_delay_multiplier  an execution of instance n takes n times as many delays, at least one
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kernel.errors import BadConfig

if TYPE_CHECKING:
    from backends.base import ModelArguments


class Delays:
    """The delays of one model instance, in seconds."""

    def __init__(self, arguments: ModelArguments) -> None:
        """Raises `BadConfig` if a parameter is not a number."""
        multiplier = _number(arguments, "instance_wise_delay_multiplier")
        # Instances are named as `plan_instances` does it.
        number = int(arguments.instance_name.rpartition("_")[2]) if multiplier else 0
        self.creation_s = _number(arguments, "creation_delay_sec")
        self.execution_s = _number(arguments, "execute_delay_ms") / 1000 * max(1, multiplier * number)

    def create(self) -> None:
        """Wait as long as a load is to take."""
        time.sleep(self.creation_s)

    def execute(self) -> None:
        """Wait as long as an execution is to take."""
        time.sleep(self.execution_s)


def _number(arguments: ModelArguments, key: str) -> int:
    """Return a parameter of the model; 0 without it. Raises `BadConfig` for anything but a number."""
    text = arguments.parameter(key)
    if text is None:
        return 0
    if not (text.isascii() and text.isdecimal()):
        raise BadConfig(
            f"parameter '{key}' of model '{arguments.model_name}' must be a number of at least 0, got '{text}'"
        )
    return int(text)
