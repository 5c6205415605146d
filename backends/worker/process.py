"""The process of a worker, however it was started: what it is to the system, and its channel to the kernel."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from backends.helper.tasks import limit_memory, lower_priority
from backends.process_control import (
    die_with_parent,
    end_sooner_without_memory,
    set_process_name,
    write_stacks_when_asked,
)
from backends.transport.channel import BlockingChannel, leave_to_parent
from backends.worker.loop import Worker
from backends.worker.preloading import PreloadFailed, run_chosen
from shm.tensor import import_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)


class PreparedWorker:
    """A worker of a model without a connection. A zygote makes it, so that its forks share most of its memory."""

    def __init__(self) -> None:
        import_arrays()
        self.channel = BlockingChannel()
        self.worker = Worker(self.channel)


def run_worker(
    title: str,
    fd: int,
    kernel: int,
    *,
    remote: bool = False,
    task_module: str = "",
    prepared: PreparedWorker | None = None,
) -> None:
    """Be the worker called `title` until the kernel ends it. The process must be a child of the process `kernel`.

    `fd` is the worker's end of the connection, and is the worker's now. With `remote` the worker shares no memory with
    the kernel. With a `task_module` it is a helper. Other workers are the `prepared` one, if there is one. The process
    ignores SIGINT and has called `prepare_process`, or is a fork of one that does and has. Raises `SystemExit` if the
    worker fails.
    """
    die_with_parent(kernel)
    end_sooner_without_memory()
    write_stacks_when_asked()
    set_process_name(title)
    if task_module:
        lower_priority()
        limit_memory(task_module)
        # Before the kernel gives it a task: on a busy machine this takes a quarter of a second, for which the first
        # requests of clients would wait, while the event loop can decode them.
        importlib.import_module(task_module)
    if prepared is None or remote or task_module:
        import_arrays()
        channel = BlockingChannel()
        worker = Worker(channel, local=not remote, task_module=task_module)
    else:
        channel, worker = prepared.channel, prepared.worker
    sock = socket.socket(fileno=fd)
    channel.connect(sock)
    leave_to_parent(channel, sock)
    if not task_module:
        worker.take_calls_of_children()
    try:
        worker.run()
    except Exception:
        # Before the connection ends: then the kernel kills the process, which threads of the model may keep alive.
        logger.exception("the worker failed")
        sys.exit(1)
    finally:
        channel.close()


def main() -> None:
    """Run the worker that the command line describes: of an interpreter of its own, the server's or another one."""
    parser = argparse.ArgumentParser(description="A worker process of the server; started by it, not by hand.")
    parser.add_argument("--model", required=True, help="name of the model instance, shown in process lists")
    parser.add_argument("--fd", type=int, required=True, help="the worker's end of the Unix socket to the kernel")
    parser.add_argument("--kernel", type=int, required=True, help="process id of the kernel")
    parser.add_argument("--remote", action="store_true", help="share no memory with the kernel")
    parser.add_argument("--helper", metavar="MODULE", default="", help="run tasks of this module, and no model")
    parser.add_argument("--preload", metavar="MODULE", action="append", default=[], help="import this module first")
    parser.add_argument("--preload-file", metavar="FILE", default="", help="run this file first, after these modules")
    arguments = parser.parse_args()
    # On Ctrl-C only the kernel acts: it drains and then stops its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare_process()
    if arguments.preload or arguments.preload_file:
        _preload(arguments.preload, arguments.preload_file)
    run_worker(arguments.model, arguments.fd, arguments.kernel, remote=arguments.remote, task_module=arguments.helper)


def _preload(modules: Sequence[str], file: str) -> None:
    """Import what the model has chosen to preload: a worker that could not be forked has it as well.

    Raises `SystemExit` if it cannot be imported; the log has the reason.
    """
    try:
        run_chosen(modules, file)
    except PreloadFailed as error:
        logger.error("the preload failed: %s", error)
        sys.exit(1)


def prepare_process() -> None:
    """Set the environment and the log of a worker's process. A worker that is forked has them from its zygote.

    Since 1.29, the import of ONNX Runtime starts a thread that sends telemetry, and makes a database in the user's
    cache folder, which it keeps open. A server must not report what it serves unless the operator asks for it; and a
    process with a second thread cannot be forked safely. What the operator has set stays.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    # The log of this process is written to standard error as it is.
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
