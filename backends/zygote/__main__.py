"""Entry point of a zygote: `python -m backends.zygote FD KERNEL TITLE`. It returns as a worker in forked processes."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

from backends.process_control import die_with_parent, set_process_name
from backends.zygote.become import ProcessTitle, become_worker
from backends.zygote.zygote import Zygote


def main() -> None:
    """Serve the kernel on the socket FD. TITLE is only room for the command lines of workers."""
    fd, kernel = int(sys.argv[1]), int(sys.argv[2])
    gc.disable()  # a collection would write to pages that workers share; workers enable it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the kernel, also if all processes of a service get these
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a server may have blocked some; workers have none blocked
    die_with_parent(kernel)
    set_process_name("naiad-zygote")
    title = ProcessTitle()
    zygote = Zygote(socket.socket(fileno=fd), kernel)
    forked = zygote.serve()
    if forked is None:
        # The kernel is gone, or needs no more workers. Nothing that was imported has to end in an orderly way.
        os._exit(0)
    del zygote
    become_worker(forked, kernel, title)


main()
