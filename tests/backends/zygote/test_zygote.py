"""What a zygote responds to the kernel; how it forks is tested with whole processes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
from typing import TYPE_CHECKING

from backends.transport import zygote_messages as messages
from backends.zygote import zygote
from backends.zygote.become import ProcessTitle
from backends.zygote.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def respond(*sent: messages.ZygoteMessage, fds: tuple[int, ...] = ()) -> Iterator[object]:
    """Send messages to a zygote in this process, and return its responses after it has ended."""
    kernel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for message in sent:
        socket.send_fds(kernel, [messages.encode(message)], fds)
    kernel.shutdown(socket.SHUT_WR)
    assert Zygote(theirs, os.getppid()).serve() is None
    theirs.close()
    for _ in range(2):
        with contextlib.suppress(ConnectionResetError):  # said once if it has not read all
            while data := kernel.recv(messages.MAX_MESSAGE):
                yield messages.to_kernel_decoder.decode(data)
    kernel.close()


def no_process() -> int:
    ctypes.set_errno(errno.EAGAIN)
    return -1


def test_a_zygote_ends_with_its_connection(one_thread: list[str]) -> None:
    assert list(respond()) == []


def test_a_zygote_says_whether_all_is_imported(one_thread: list[str]) -> None:
    chosen = messages.PreloadChosen
    found = list(respond(chosen(("json",), ""), chosen(("no_such_module_x",), ""), chosen((), "")))
    assert [type(each) for each in found] == [messages.Preloaded, messages.ForkFailed, messages.Preloaded]


def test_a_fork_that_the_system_refuses_is_an_error_with_its_number(
    one_thread: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote, "fork_plainly", no_process)
    pipe = os.pipe()
    [failed] = respond(messages.ForkWorker(7, "m_0", "1.1"), fds=(*pipe, pipe[0]))
    assert isinstance(failed, messages.ForkFailed)
    assert (failed.number, failed.error_number) == (7, errno.EAGAIN)
    os.close(pipe[1])
    assert os.read(pipe[0], 1) == b"", "the zygote has closed what it got"
    os.close(pipe[0])


def test_a_process_between_that_cannot_fork_says_why_by_its_exit_code(
    one_thread: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote, "fork_plainly", lambda: 4711)
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (pid, errno.ENOMEM << 8))
    assert list(respond(messages.ForkWorker(7, "m_0", "1.1"))) == [
        messages.ForkFailed(7, os.strerror(errno.ENOMEM), errno.ENOMEM)
    ]


def test_with_a_second_thread_a_zygote_says_so_and_ends(one_thread: list[str]) -> None:
    one_thread.append("second")
    first = messages.ForkWorker(7, "m_0", "1.1", "identity", imports_late=True)
    assert list(respond(first, first)) == [messages.ThreadsLeft(7, "identity", "2 threads (zygote, second)")]


def test_the_command_line_is_cut_to_its_room_and_nothing_else_is_written() -> None:
    pid = os.fork()
    if pid == 0:
        try:
            room = len(open("/proc/self/cmdline", "rb").read())  # noqa: SIM115 - the process ends
            title = ProcessTitle()
            title.set(["naiad", "--model=ä"])
            short = open("/proc/self/cmdline", "rb").read()  # noqa: SIM115
            title.set(["x" * (room + 100)])
            long = open("/proc/self/cmdline", "rb").read()  # noqa: SIM115
            good = short.rstrip(b"\0") == "naiad\0--model=ä".encode() and len(short) == len(long) == room
            os._exit(0 if good and long == b"x" * (room - 1) + b"\0" else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(pid, 0) == (pid, 0)
