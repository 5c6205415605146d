"""Counts the lines of Python that a call executes: how work grows, on a machine of any speed."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


def executed_lines(function: Callable[[], object]) -> int:
    """Return how many lines `function` executes, with those of all that it calls. A loop's lines count each time."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.collect()
    gc.disable()  # what it collects may execute code as well
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return count
