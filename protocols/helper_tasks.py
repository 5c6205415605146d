"""The functions that helpers run, by name. Only helpers import this module, by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.http.inference.tasks import DECODE_INFER, ENCODE_INFER, decode_infer_task, encode_infer_task

if TYPE_CHECKING:
    from kernel.serving.helper_tasks import TaskFunction

TASKS: dict[str, TaskFunction] = {
    DECODE_INFER: decode_infer_task,
    ENCODE_INFER: encode_infer_task,
}
