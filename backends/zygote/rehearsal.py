"""Runs the first steps of a worker once before the forks, so that workers share the memory that these steps change.

The interpreter writes to a function's memory when the function runs for the first times: counters and caches in its
code. After a fork each such page becomes the worker's own. A backend may have a module `rehearsal` beside it, with a
function `rehearse` that does the same for its own first steps, starts no thread and leaves nothing behind.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket

import msgspec

from backends.transport import wire
from backends.transport.channel import BlockingChannel
from backends.worker.loop import Worker

#: After the first rounds the interpreter changes little more.
_ROUNDS = 3

#: As the kernel sends the configuration of a small model.
_TENSORS = (
    '[{"name":"A","data_type":"TYPE_FP32","format":"FORMAT_NONE","dims":[4],"is_shape_tensor":false,'
    '"allow_ragged_batch":false,"optional":false,"is_non_linear_format_io":false}]'
)
_CONFIG = (
    '{"name":"m","platform":"","backend":"python","runtime":"","version_policy":{"latest":{"num_versions":1}},'
    f'"max_batch_size":0,"input":{_TENSORS},"output":{_TENSORS},"batch_input":[],"batch_output":[],'
    '"instance_group":[{"name":"m_0","kind":"KIND_CPU","count":1,"gpus":[],"profile":[],"passive":false,'
    '"host_policy":""}],"default_model_filename":"","parameters":{},"model_warmup":[]}'
)


def rehearse(backend_module: str) -> None:
    """Rehearse the start of a worker whose backend is in this module. Leaves nothing behind."""
    name = f"{backend_module.rpartition('.')[0]}.rehearsal"
    own = importlib.import_module(name) if importlib.util.find_spec(name) is not None else None
    for _ in range(_ROUNDS):
        ours, others = socket.socketpair()
        worker = Worker(BlockingChannel(ours))
        try:
            _take_messages()
            if own is not None:
                own.rehearse(worker, msgspec.json.decode(_CONFIG, type=dict))
        finally:
            worker.close()
            others.close()


def _take_messages() -> None:
    """Decode what the kernel sends first, and encode what the worker responds."""
    for message in (wire.Complete(_CONFIG, "/m", 1), wire.Load(_CONFIG, "/m", 1, "m_0"), wire.Joined()):
        wire.to_worker_decoder.decode(wire.encoder.encode(message))
    for response in (wire.Hello(wire.PROTOCOL, 1), wire.Completed(_CONFIG), wire.Loaded()):
        wire.encoder.encode(response)
