"""Limits and sizes that documents state are those of the code."""

from __future__ import annotations

import re

import pytest

from backends.launch.launcher import DELAYS_S
from backends.supervision import handle
from backends.supervision.instance_watch import MESSAGE_LIMIT_NS, TERM_GRACE_NS
from backends.supervision.remote_memory import MAX_UNSENT_BYTE_SIZE
from backends.supervision.watchdog import LOOK_INTERVAL_S
from backends.transport import framing as framing_of_workers
from backends.transport import outbox, wire
from backends.transport.texts import MAX_TEXT_BYTES
from backends.worker.loop import MAX_UNSENT_NS
from backends.worker.responder import MAX_OVERSHOOT
from kernel.errors import MAX_MODEL_TEXT
from kernel.flags.read import DEFAULTS
from kernel.loop import busy_poll
from kernel.memory.client_regions import MAX_REGIONS
from kernel.observe.log_writer import MAX_BYTE_SIZE, MAX_LINES
from kernel.observe.metric_rules import MAX_LABELS_LENGTH, MAX_SERIES
from kernel.repository.override import (
    MAX_CONFIG_BYTE_SIZE,
    MAX_FILES_BYTE_SIZE,
    MAX_PATH_BYTE_SIZE,
    MAX_PATH_DEPTH,
)
from kernel.repository.unsupported import MAX_INSTANCES
from kernel.serving.instances import PREFETCH_NS
from kernel.texts import MAX_TEXT_BYTE_SIZE
from protocols import request_limits
from protocols.grpc import framing
from protocols.grpc.h2 import limits
from protocols.http.client_limits import MAX_CHUNKS, TIMEOUTS
from protocols.http.fast.connection import MAX_OUTSTANDING
from protocols.http.json.document import MAX_DEPTH
from shm.arena import INLINE_LIMIT
from shm.blocks import CACHED_BYTES
from tests.docs.documents import document
from tests.end_to_end.call_limits import MOST_CALLS


def size(byte_size: int) -> str:
    """Return a size as documents write it: a limit that is one less than a power of two is meant to be that power."""
    units = ["bytes", "KiB", "MiB", "GiB"]
    while byte_size >= 1024:
        byte_size = (byte_size + 1) // 1024
        units.pop(0)
    return f"{byte_size} {units[0]}"


def delays() -> str:
    *first, last = (f"{delay:.0f}" for delay in DELAYS_S[1:])
    return f"{', '.join(first)} and {last} seconds"


#: What a document says, made from what the code says.
STATEMENTS = {
    "SECURITY.md": [
        f"| {size(DEFAULTS.http.max_input_size)} of JSON, raw or inflated bytes",
        f"{size(request_limits.MAX_BODY_BYTE_SIZE)} in all; {MAX_CHUNKS:,} chunks",
        f"| {TIMEOUTS.body_s:.0f} seconds without any byte; then {TIMEOUTS.bytes_per_s} bytes per second",
        f"| {MAX_OUTSTANDING}, then nothing more is read",
        f"| {MAX_DEPTH} levels deep",
        f"| {size(request_limits.MAX_BODY_BYTE_SIZE)}; "
        f"compressed {size(framing.MAX_INFLATED_BYTE_SIZE)} after inflating",
        f"| {limits.MAX_CONCURRENT_STREAMS} calls at once; header blocks of {size(limits.MAX_HEADER_BLOCK_BYTE_SIZE)}",
        f"| regions of clients | {MAX_REGIONS}; {DEFAULTS.regions_per_peer} of one client",
        f"| {MAX_LINES:,}, and {size(MAX_BYTE_SIZE)}; further ones are dropped",
        f"| {DEFAULTS.log.model_lines_per_s} lines and {size(DEFAULTS.log.model_bytes_per_s)} per second",
        f"| responses that a decoupled model is ahead of its client | {wire.CREDIT_WINDOW} |",
        f"| more of them, from tasks in the event loop of an `async def execute` | {MAX_OVERSHOOT} |",
        f"| `config` of a load request | {size(MAX_CONFIG_BYTE_SIZE)} |",
        f"| files of a load request | {size(MAX_FILES_BYTE_SIZE)} |",
        f"| path of a file in a load request | {MAX_PATH_BYTE_SIZE} bytes, {MAX_PATH_DEPTH} folders |",
        f"without tensors and files | {size(request_limits.MAX_CONTROL_BYTE_SIZE)}, over HTTP and gRPC |",
        f"| text of a client in an error | {size(MAX_TEXT_BYTE_SIZE)}; text of a model {size(MAX_MODEL_TEXT)} |",
        f"| instances of a model | {MAX_INSTANCES} |",
        f"| {DEFAULTS.repository.load_timeout_s // 60} minutes each",
        f"unloaded or replaced | {DEFAULTS.repository.unload_timeout_s // 60} minutes",
        f"| {size(framing_of_workers.MAX_WORKER_FRAME)}, of which the rest comes within {MESSAGE_LIMIT_NS / 1e9:.0f} s",
        f"error text of a model, line that it logs | {size(MAX_TEXT_BYTES)} |",
        f"| {MAX_SERIES:,}, labels of {MAX_LABELS_LENGTH} characters |",
    ],
    "docs/architecture.md": [
        f"| tensor of up to {INLINE_LIMIT} bytes |",
        f"up to {size(CACHED_BYTES)} of freed blocks",
        f"the worker's outbox, {size(outbox.BYTE_SIZE)} |",
        f"in chunks of {size(wire.CHUNK_BYTE_SIZE)}",
    ],
    "docs/differences.md": [
        f"a `config` of {size(MAX_CONFIG_BYTE_SIZE)}, and files of {size(MAX_FILES_BYTE_SIZE)} in all",
        f"paths of {MAX_PATH_BYTE_SIZE} bytes and {MAX_PATH_DEPTH} folders",
        f"repeats at most {size(MAX_TEXT_BYTE_SIZE)}",
        f"have at most {size(request_limits.MAX_CONTROL_BYTE_SIZE)}",
        f"More than {MAX_INSTANCES} instances",
        f"within less than {DEFAULTS.busy_poll_us / 1000} ms",
        f"can be {wire.CREDIT_WINDOW} responses ahead",
    ],
    "docs/flags-and-logs.md": [
        f"up to {MAX_LINES:,} lines or {size(MAX_BYTE_SIZE)} wait",
        f"to {DEFAULTS.log.model_lines_per_s} lines and {size(DEFAULTS.log.model_bytes_per_s)} per second",
    ],
    "docs/decisions/a-process-per-model-instance.md": [delays(), f"up to {PREFETCH_NS / 1e6} ms of work ahead"],
    "docs/decisions/busy-polling.md": [
        f"{DEFAULTS.busy_poll_us} µs by default",
        f"for {busy_poll.FIRST_PAUSE_NS / 1e9} s at first and up to {busy_poll.LONGEST_PAUSE_NS / 1e9} s",
    ],
    "docs/decisions/prepared-requests.md": [f"{MOST_CALLS['http']} calls over HTTP and {MOST_CALLS['grpc']} over gRPC"],
    "docs/decisions/the-outbox.md": [
        f"{size(outbox.BYTE_SIZE)} in a memfd",
        f"the oldest response is {MAX_UNSENT_NS / 1e6} ms old",
        f"has finished none for {handle.OUTBOX_CHECK_S * 1000:.0f} ms",
    ],
    "docs/python-models.md": [
        f"After {DEFAULTS.execution_report_s} s (`--execution-report-secs`)",
        f"SIGKILL {TERM_GRACE_NS / 1e9:.0f} s later",
        f"has {DEFAULTS.repository.unload_timeout_s} s for its last requests",
        f"{size(MAX_TEXT_BYTES)} of a text are kept",
    ],
    "docs/decisions/watching-workers.md": [f"can take {LOOK_INTERVAL_S} s longer than its limit"],
    "docs/decisions/where-tensors-live.md": [
        f"up to {INLINE_LIMIT} bytes",
        f"up to {size(CACHED_BYTES)} of freed blocks",
    ],
    "docs/decisions/workers-without-shared-memory.md": [
        f"at most {size(wire.CHUNK_BYTE_SIZE)} bring its bytes",
        f"at most {size(MAX_UNSENT_BYTE_SIZE)} is unsent",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_document_states_the_figures_of_the_code(name: str) -> None:
    text = re.sub(r"\s+", " ", document(name))
    assert [statement for statement in STATEMENTS[name] if statement not in text] == []
