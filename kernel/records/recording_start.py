"""Makes the flight recorder, if the options ask for it. Other servers import nothing more of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.records.record_settings import RecordSettings
    from kernel.records.recorder import Recording
    from kernel.records.tracer import TraceHelpers
    from kernel.serving.kernel import Kernel


def make_recording(
    kernel: Kernel, make_helpers: Callable[..., TraceHelpers], settings: RecordSettings | None
) -> Recording | None:
    """Return the recording with these settings; None records nothing.

    `make_helpers` is `HelperPool` without its first arguments. Raises `ServingError` if the folder cannot be used.
    """
    if settings is None:
        return None
    from kernel.records.recorder import Recording  # takes memory, which other servers need not spend

    return Recording(kernel, make_helpers(1 << 20, count=1, title="recorder"), settings)
