"""The times of one execution, as its worker has measured them."""

from __future__ import annotations

import msgspec


class ExecutionTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The times of one execution, in monotonic nanoseconds of the kernel's clock. The names are Triton's.

    The input stage ends at `input_end_ns`, the inference stage at `output_start_ns`, the output stage at
    `compute_end_ns`; each begins where the one before ends.
    """

    compute_start_ns: int
    input_end_ns: int
    output_start_ns: int
    compute_end_ns: int
