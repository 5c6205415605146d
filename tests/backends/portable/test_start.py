"""The first steps of a worker on another interpreter: it says what is missing, and shows a model nothing of ours."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backends.portable import start
from backends.transport import wire
from backends.transport.framing import MAX_WORKER_FRAME, FrameReader
from tests.end_to_end.environments import interpreters

if TYPE_CHECKING:
    from collections.abc import Sequence

START = Path(start.__file__)


def first_message(python: Sequence[str], **variables: str) -> tuple[wire.ToKernel | None, str]:
    """Start a worker, end its connection, and return its first message and what it has printed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [*python, f"--fd={theirs.fileno()}", f"--kernel={os.getpid()}", "--model=m"],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
            env={**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **variables},
        )
        theirs.close()
        reader, raw = FrameReader(MAX_WORKER_FRAME), list[bytes]()
        while not raw and (data := ours.recv(1 << 16)):
            raw += reader.feed(data)
        ours.shutdown(socket.SHUT_RDWR)
        _, printed = process.communicate(timeout=50)
    return (wire.to_kernel_decoder.decode(raw[0]) if raw else None), printed


def test_a_worker_says_hello_from_any_folder_without_a_search_path(tmp_path: Path) -> None:
    (tmp_path / "backends.py").write_text("raise SystemExit('this is not ours')")
    message, printed = first_message([sys.executable, str(START)], PYTHONPATH=str(tmp_path))
    assert isinstance(message, wire.Hello), printed
    assert message.protocol == wire.PROTOCOL


def test_an_interpreter_without_numpy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('libblas is missing')")
    message, _ = first_message([sys.executable, str(START)], PYTHONPATH=str(tmp_path))
    text = "numpy cannot be imported, which a worker needs: libblas is missing"
    assert message == wire.LoadFailed("unavailable", text)


@pytest.mark.parametrize("version", ["3.7", "3.8"])
def test_an_old_interpreter_is_refused(version: str) -> None:
    for python in interpreters(version):
        message, printed = first_message([python, str(START)])
        assert message == wire.LoadFailed("unavailable", f"it has Python {version}; a worker needs 3.9 or newer"), (
            printed
        )
        return
    pytest.skip(f"there is no Python {version} on this machine")


def test_the_stand_in_is_not_there_for_libraries_of_the_model(tmp_path: Path) -> None:
    """A module `msgspec` that is too old plays that there is none."""
    (tmp_path / "msgspec.py").write_text("__version__ = '0.1'\n")
    code = f"""
    import sys
    sys.path.insert(0, {str(tmp_path)!r})
    sys.path.insert(0, {str(START.parent)!r})
    import start
    del sys.path[0]
    main = start._import_worker({str(START.parents[2])!r})
    import msgspec
    print(msgspec.__version__, main.__module__)
    print(sys.modules["backends.transport.wire"].msgspec.Struct.__module__)
    print([type(finder).__name__ for finder in sys.meta_path if type(finder).__name__ == "_OurPackages"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout.split("\n")[:3] == [
        "0.1 backends.worker.process", "backends.portable.structs", "[]",
    ], done.stderr  # fmt: skip
