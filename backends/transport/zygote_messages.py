"""What the kernel and a zygote say to each other, one message in each packet of a SOCK_SEQPACKET socket.

A `ForkWorker` comes with three descriptors, in this order: the worker's end of its connection, and the ends of the
pipes that become its standard output and standard error.
"""

from __future__ import annotations

import msgspec

#: The environment variable with the mark of a worker. What its model starts inherits it, so that the kernel knows what
#: to end with the worker. Forks of a worker have it in their command line, behind `MARK_OPTION`.
MARK = "NAIAD_WORKER"
MARK_OPTION = "--mark="

#: The last argument of a zygote: room for the command lines of its workers. Names of models are names of folders, which
#: have at most 255 bytes.
ROOM = "-" * 640

#: The longest message in bytes. A longer one is cut by the system, and not decoded.
MAX_MESSAGE = 64 << 10


class ZygoteMessage(msgspec.Struct, tag=True, frozen=True):
    """A message in either direction."""


class PreloadChosen(ZygoteMessage, frozen=True):
    """Import these modules, and then run the file. The zygote responds `Preloaded`, `ForkFailed` or `ThreadsLeft`."""

    modules: tuple[str, ...]
    #: Path of a `preload.py`; "" for none.
    file: str


class ForkWorker(ZygoteMessage, frozen=True):
    """Fork a worker. The zygote responds `Forked`, `ForkFailed` or `ThreadsLeft`."""

    #: Returned with the response.
    number: int
    #: The name of the instance, for process lists.
    title: str
    #: What tells the worker's processes from processes of other workers, see `MARK`.
    mark: str
    #: The backend that the worker will use; "" for none. It is imported before the fork, unless `imports_late`.
    backend: str = ""
    imports_late: bool = False
    #: Whether the worker shares no memory with the kernel.
    remote: bool = False
    #: The module with the tasks of a helper; "" for a worker with a model.
    task_module: str = ""


class Preloaded(ZygoteMessage, frozen=True):
    """All is imported, and one thread runs."""


class Forked(ZygoteMessage, frozen=True):
    """The worker runs and is a child of the kernel."""

    number: int
    pid: int


class ForkFailed(ZygoteMessage, frozen=True):
    """A `PreloadChosen` (number 0) or a `ForkWorker` could not be done; the zygote continues."""

    number: int
    text: str
    #: The error number of the system; 0 if there is none.
    error_number: int = 0


class ThreadsLeft(ZygoteMessage, frozen=True):
    """The import of a backend has left threads, so nothing can be forked any more: the zygote ends.

    With number 0 and without a backend, what a model has chosen has left them (`PreloadChosen`).
    """

    number: int
    backend: str
    text: str


to_zygote_decoder = msgspec.msgpack.Decoder(PreloadChosen | ForkWorker)
to_kernel_decoder = msgspec.msgpack.Decoder(Preloaded | Forked | ForkFailed | ThreadsLeft)
encode = msgspec.msgpack.Encoder().encode
