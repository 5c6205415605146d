"""What a backend reports about a batch, in place of what its worker measures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.observe.reporting.execution_times import ExecutionTimes  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from kernel.serving.request import Request


class ReportedRequest(msgspec.Struct, frozen=True):
    """What a backend has reported about a request."""

    times: ExecutionTimes
    success: bool = True


class ReportedExecution(msgspec.Struct, frozen=True):
    """What a backend has reported about an execution, which may be a part of a batch."""

    rows: int
    times: ExecutionTimes


class BatchReports(msgspec.Struct):
    """What a backend has reported about a batch and its requests; what is missing is measured."""

    requests: dict[Request, ReportedRequest] = {}
    executions: list[ReportedExecution] = []
