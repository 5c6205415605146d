"""Rehearses the life of a worker some times before the forks, so that workers share the memory that this changes.

The interpreter writes to a function's memory when the function runs for the first times: counters and caches in its
code. When it has written these caches, the function also reads fewer names and types, and to read an object is to write
its reference count. After a fork each page that is written becomes the worker's own. A backend may have a module
`rehearsal` beside it, whose `rehearsed_model` makes a model that the rehearsed workers load; else they load none. With
`COMPUTES` false there, the model gets no request: it is of a library that must not compute before a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import socket
import time

from backends.transport import wire
from backends.transport.channel import BlockingChannel
from backends.transport.framing import frame
from backends.worker.loop import Worker
from shm.tensor import Tensor

#: CPython 3.11 specialises a function in its ninth call; later versions do it sooner.
_ROUNDS = 10

#: How long threads of a rehearsed worker may take to end, in seconds.
_END_S = 1.0

#: As the kernel sends the configuration of a small model.
_TENSORS = (
    '[{"name":"%s","data_type":"TYPE_FP32","format":"FORMAT_NONE","dims":[4],"is_shape_tensor":false,'
    '"allow_ragged_batch":false,"optional":false,"is_non_linear_format_io":false}]'
)
_CONFIG = (
    '{"name":"m","platform":"","backend":"%s","runtime":"","version_policy":{"latest":{"num_versions":1}},'
    f'"max_batch_size":0,"input":{_TENSORS % "A"},"output":{_TENSORS % "predict"},"batch_input":[],"batch_output":[],'
    '"instance_group":[{"name":"m_0","kind":"KIND_CPU","count":1,"gpus":[],"profile":[],"passive":false,'
    '"host_policy":""}],"default_model_filename":"","parameters":{},"model_warmup":[]}'
)


def rehearse(backend_module: str) -> None:
    """Rehearse workers whose backend is in this module. Leaves nothing behind."""
    package = backend_module.rpartition(".")[0]
    name, config = f"{package}.rehearsal", _CONFIG % package.rpartition(".")[2]
    own = importlib.import_module(name) if importlib.util.find_spec(name) is not None else None
    thread_count = _thread_count()
    gc.freeze()  # so that the collection below visits only what the rehearsal has made
    with contextlib.nullcontext() if own is None else own.rehearsed_model() as folder:
        for _ in range(_ROUNDS):
            _rehearse_worker(config, folder, computes=own is not None and own.COMPUTES)
    gc.collect()
    end_s = time.monotonic() + _END_S
    while _thread_count() > thread_count and time.monotonic() < end_s:
        time.sleep(0.0001)  # threads that were joined may still be about to end, and there must be one at a fork


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def _rehearse_worker(config: str, folder: str | None, *, computes: bool) -> None:
    """Run a worker, with the model in `folder` if there is one, until the kernel stops it."""
    ours, others = socket.socketpair()
    worker = Worker(BlockingChannel(ours))
    worker.rehearses = True
    messages: list[wire.ToWorker] = [wire.Joined(), wire.Stop()]
    if folder is not None:
        messages = [wire.Complete(config, folder, 1), wire.Load(config, folder, 1, "m_0"), *messages]
    if computes:
        messages.insert(-1, wire.Execute(1, [wire.RequestMessage(1, [Tensor("A", "FP32", [4], bytes(16))])]))
    try:
        for message in messages:
            others.sendall(frame(wire.encoder.encode(message)))
        worker.run()
    finally:
        worker.close()
        others.close()
