"""What a backend reports about its executions, collected until the kernel must know it. Callable from any thread.

What is reported stands in the statistics instead of what the worker measures. A report that contradicts itself is
corrected, and the log says so once: times that are not in order, times of another clock, a request that is reported
twice.

Sends the tensors of requests whose traces have tensors. Other requests are not affected.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.transport import wire
from kernel.errors import ErrorCode, InternalError
from kernel.records.trace import BACKEND_OUTPUT, QUEUE_INPUT, TRACED_BYTE_SIZE, TracedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.worker.request import OutputValue, WorkerRequest
    from kernel.errors import ServingError

#: The longest name of an activity, in characters.
MAX_NAME_LENGTH = 256

#: After how many reports they are sent, although no request has ended.
_SEND_AFTER = 64

#: The largest index of a response that has statistics of its own. A stream may have any number of responses.
MAX_RESPONSE_INDEX = 1023

_KINDS = frozenset({"CPU", "CPU_PINNED", "GPU"})


class ReportCollector:
    """The reports of one worker."""

    def __init__(
        self,
        send: Callable[[wire.ToKernel], None],
        log: Callable[[str, str], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`log` takes a level and a line; `clock` returns monotonic nanoseconds."""
        self._send = send
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._reported = wire.Reported()
        #: Whether there is anything to send.
        self.pending = False
        self._complained = False
        #: Whether the kernel accepts memory figures yet, and the figures that it gets as soon as it does.
        self._joined = False
        self._memory: Sequence[tuple[str, int, int]] = ()
        #: By kind and device: what the worker itself has allocated for tensors of the model, in bytes.
        self._own_memory: dict[tuple[str, int], int] = {}
        self._memory_changed = False

    # ---- for backends ------------------------------------------------------------------------

    def request(self, request: WorkerRequest, given: Sequence[int], *, success: bool) -> None:
        """Report a request; see `WorkerRequest.report`."""
        if request.reported:
            self._complain(f"request '{request.id}' was reported twice; the first report counts")
            return
        request.reported = True
        report = wire.RequestReport(request.ref.number, self._in_order(given), success)
        self._add("requests", report)

    def response(
        self,
        request: WorkerRequest,
        index: int,
        start_ns: int,
        inferred_ns: int | None,
        end_ns: int,
        error: ServingError | None,
    ) -> None:
        """Report a response; see `WorkerRequest.report_response`."""
        if index > MAX_RESPONSE_INDEX:
            return
        times = self._in_order((start_ns, start_ns, end_ns if inferred_ns is None else inferred_ns, end_ns))
        outcome = "success" if inferred_ns is not None else "empty_response"
        if error is not None:
            outcome = "cancel" if error.code is ErrorCode.CANCELLED else "fail"
        report = wire.ResponseReport(max(index, 0), outcome, times.start_ns, times.output_start_ns, times.end_ns)
        self._add("responses", report)

    def activity(self, request: WorkerRequest, name: str, ns: int | None) -> None:
        """Report a point of a request's trace; see `WorkerRequest.report_activity`."""
        if request.ref.trace is None:
            return
        if not name or len(name) > MAX_NAME_LENGTH:
            raise InternalError(
                f"the name of an activity must have 1 to {MAX_NAME_LENGTH} characters, got {len(name)}: '{name[:40]}'"
            )
        now_ns = self._clock()
        if ns is not None and not 0 <= ns <= now_ns:
            self._complain(f"activity '{name}' is at {ns} ns, which is not a time before now ({now_ns} ns)")
            ns = now_ns
        self._add("activities", wire.Activity(request.ref.number, name, now_ns if ns is None else ns))

    def memory(self, uses: Sequence[tuple[str, int, int]]) -> None:
        """Report what memory the instance uses; see `Host.report_memory`. The newest report counts."""
        for kind, device_id, byte_size in uses:
            if kind not in _KINDS or device_id < 0 or byte_size < 0:
                raise InternalError(
                    "a use of memory is a kind (CPU, CPU_PINNED or GPU), the number of a device and a number of bytes, "
                    f"got {kind!r}, {device_id}, {byte_size}"
                )
        with self._lock:
            self._memory, self._memory_changed = list(uses), True
        self._send_memory()

    # ---- for the worker ----------------------------------------------------------------------

    def own_memory(self, kind: str, device_id: int, byte_size: int) -> None:
        """Count what the worker has allocated itself, in addition to what the backend reports."""
        with self._lock:
            self._own_memory[kind, device_id] = byte_size
            self._memory_changed = True
        self._send_memory()

    def joined(self) -> None:
        """The kernel takes reports of memory from now on."""
        self._joined = True
        self._send_memory()

    def flush(self, batch: int = 0, executions: Sequence[tuple[int, Sequence[int]]] = ()) -> None:
        """Send what was reported. `executions` are rows and times of parts of `batch`, which is being executed."""
        reports = [self._execution(rows, times) for rows, times in executions]
        with self._lock:
            if not (self.pending or reports):
                return
            reported, self._reported = self._reported, wire.Reported()
            self.pending = False
            reported.batch, reported.batches = batch, reports[: wire.MAX_REPORTS]
            self._send(reported)

    def _execution(self, rows: int, times: Sequence[int]) -> wire.BatchReport:
        if rows < 1:
            self._complain(f"an execution of {rows} rows was reported; it has at least one")
        return wire.BatchReport(max(rows, 1), self._in_order(times))

    def _add(self, kind: str, report: wire.RequestReport | wire.ResponseReport | wire.Activity) -> None:
        with self._lock:
            reports = getattr(self._reported, kind)
            reports.append(report)
            self.pending = True
            full = len(reports) >= _SEND_AFTER
        if full:
            self.flush()

    def _send_memory(self) -> None:
        with self._lock:
            if not (self._joined and self._memory_changed):
                return
            self._memory_changed = False
            own = dict(self._own_memory)
            uses = [(kind, device, size + own.pop((kind, device), 0)) for kind, device, size in self._memory]
            uses += [(*where, size) for where, size in own.items()]
            self._send(wire.MemoryUsed([wire.MemoryUse(*use) for use in uses]))

    def _in_order(self, given: Sequence[int]) -> wire.StageTimes:
        times, problem = stage_times(given, self._clock())
        if problem:
            self._complain(problem)
        return times

    def _complain(self, text: str) -> None:
        if not self._complained:
            self._complained = True
            self._log("WARNING", f"a report of the backend contradicts itself: {text} (this is logged once)")


def stage_times(given: Sequence[int], now_ns: int) -> tuple[wire.StageTimes, str]:
    """Return four reported times in order, none after `now_ns`, and what was wrong with them ("" if nothing was)."""
    corrected: list[int] = []
    earliest = 0
    for ns in given:
        earliest = min(max(earliest, ns), now_ns)
        corrected.append(earliest)
    problem = ""
    if corrected != list(given):
        shown = ", ".join(map(str, given))
        problem = f"the times {shown} are not in order, or not monotonic nanoseconds up to now ({now_ns})"
    return wire.StageTimes(*corrected), problem


def send_inputs(requests: Sequence[WorkerRequest], send: Callable[[wire.ToKernel], None]) -> None:
    """Send the inputs of the requests in a batch whose tensors are traced, before the model may change them."""
    for request in requests:
        trace = request.ref.trace
        if trace is not None and trace.tensors:
            send(wire.TensorsTraced(request.ref.number, [
                TracedTensor(
                    QUEUE_INPUT, tensor.name, tensor.datatype, list(tensor.shape),
                    bytes(memoryview(tensor.data or b"").cast("B")[:TRACED_BYTE_SIZE]), tensor.byte_size,
                )
                for tensor in request.inputs
            ]))  # fmt: skip


def send_outputs(request: WorkerRequest, outputs: Sequence[OutputValue], send: Callable[[wire.ToKernel], None]) -> None:
    """Send the outputs of a request whose tensors are traced."""
    send(wire.TensorsTraced(request.ref.number, [
        TracedTensor(
            BACKEND_OUTPUT, output.name, output.datatype, list(output.array.shape), *_beginning(output)
        )
        for output in outputs
        if request.wants(output.name)
    ]))  # fmt: skip


def _beginning(output: OutputValue) -> tuple[bytes, int]:
    """Return the first bytes of an output, in the form of the protocols, and how many it has."""
    array: Any = output.array
    if array.dtype is None:  # it is on a device, and perhaps not computed yet
        return b"", int(array.nbytes)
    if output.datatype != "BYTES":
        flat = array.reshape(-1)[:TRACED_BYTE_SIZE]  # of each element at least one byte
        return np.ascontiguousarray(flat).tobytes()[:TRACED_BYTE_SIZE], int(array.nbytes)
    beginning = b""
    byte_size = 0
    for element in array.reshape(-1).tolist():
        octets = element if isinstance(element, bytes) else str(element).encode()
        byte_size += 4 + len(octets)
        if len(beginning) < TRACED_BYTE_SIZE:
            beginning += len(octets).to_bytes(4, "little") + octets[:TRACED_BYTE_SIZE]
    return beginning[:TRACED_BYTE_SIZE], byte_size
