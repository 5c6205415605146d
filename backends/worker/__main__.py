"""Entry point of a worker process: `python -m backends.worker --model NAME --fd N --kernel PID`."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import socket
import sys

from backends.helper.priority import lower_priority
from backends.helper.tasks import limit_memory
from backends.transport.channel import BlockingChannel
from backends.worker.loop import Worker

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker process of the server; started by it, not by hand.")
    parser.add_argument("--model", required=True, help="name of the model instance, shown in process lists")
    parser.add_argument("--fd", type=int, required=True, help="the worker's end of the Unix socket to the kernel")
    parser.add_argument("--kernel", type=int, required=True, help="process id of the kernel")
    parser.add_argument("--remote", action="store_true", help="share no memory with the kernel")
    parser.add_argument("--helper", metavar="MODULE", help="run tasks of this module, and no model")
    arguments = parser.parse_args()
    _die_with(arguments.kernel)
    # On Ctrl-C only the kernel acts: it drains and then stops its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    channel = BlockingChannel(socket.socket(fileno=arguments.fd))
    if arguments.helper is not None:
        lower_priority()
        limit_memory()
    try:
        Worker(channel, local=not arguments.remote, task_module=arguments.helper or "").run()
    except Exception:
        # Before the connection ends: then the kernel kills the process, which threads of the model may keep alive.
        logger.exception("the worker failed")
        sys.exit(1)
    finally:
        channel.close()


def _die_with(kernel: int) -> None:
    """Let the system kill this process when the kernel dies, also while the model executes."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_NAME, b"naiad-worker")
    if os.getppid() != kernel:
        sys.exit("the kernel is gone")


main()
