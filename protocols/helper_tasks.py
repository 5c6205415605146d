"""The functions that helpers run, by name. Only helpers import this module, by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.records.record_task import WRITE_RECORDS, write_records_task
from kernel.records.trace_export import EXPORT_TRACES, export_traces_task
from kernel.records.trace_files import WRITE_TRACES, write_traces_task
from kernel.serving.request_key import DIGEST, digest_task
from kernel.traffic.comparing import COMPARE, compare_task
from protocols.grpc.large_request import DECODE_MESSAGE, decode_message_task
from protocols.http.inference.tasks import (
    DECODE_GENERATE,
    DECODE_INFER,
    ENCODE_GENERATE,
    ENCODE_INFER,
    decode_generate_task,
    decode_infer_task,
    encode_generate_task,
    encode_infer_task,
)
from protocols.http.load_request import DECODE_LOAD, decode_load_task
from protocols.openai.preparing import FIND_MODEL, PREPARE, find_model_task, prepare_task

if TYPE_CHECKING:
    from kernel.serving.helper_tasks import TaskFunction

TASKS: dict[str, TaskFunction] = {
    DECODE_INFER: decode_infer_task,
    ENCODE_INFER: encode_infer_task,
    DECODE_GENERATE: decode_generate_task,
    ENCODE_GENERATE: encode_generate_task,
    DECODE_LOAD: decode_load_task,
    DECODE_MESSAGE: decode_message_task,
    FIND_MODEL: find_model_task,
    PREPARE: prepare_task,
    DIGEST: digest_task,
    COMPARE: compare_task,
    WRITE_TRACES: write_traces_task,
    EXPORT_TRACES: export_traces_task,
    WRITE_RECORDS: write_records_task,
}
