"""The rehearsal of a worker leaves the process as it was: every worker is a fork of it."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from backends.registry import BUILT_IN
from backends.transport import wire
from backends.transport.channel import BlockingChannel
from backends.zygote.rehearsal import rehearse
from tests.open_descriptors import open_descriptors
from tests.own_records import own_records


@pytest.mark.parametrize("backend", sorted(BUILT_IN))
def test_a_rehearsal_leaves_nothing_behind(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # zygotes of other tests rehearse in the usual one
    module = BUILT_IN[backend].partition(":")[0]
    rehearse(module)  # modules of ours that it imports stay
    modules, path, arguments = set(sys.modules), list(sys.path), list(sys.argv)
    descriptors, threads, finders = open_descriptors(), set(threading.enumerate()), set(sys.path_importer_cache)
    rehearse(module)
    assert (set(sys.modules), set(sys.path_importer_cache)) == (modules, finders)
    assert (sys.path, sys.argv) == (path, arguments)
    assert open_descriptors() <= descriptors
    assert set(threading.enumerate()) <= threads
    assert os.listdir(tmp_path) == []
    assert Path.cwd().is_dir()


@pytest.mark.parametrize("backend", sorted(BUILT_IN))
def test_a_rehearsal_succeeds(backend: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    send = BlockingChannel.send_later

    def recorded(self: BlockingChannel, message: wire.ToKernel) -> None:
        sent.append(message)
        send(self, message)

    monkeypatch.setattr(BlockingChannel, "send_later", recorded)
    rehearse(BUILT_IN[backend].partition(":")[0])
    assert own_records(caplog) == []
    assert not any(isinstance(each, wire.LoadFailed) for each in sent)
    responses = [response for each in sent if isinstance(each, wire.Executed) for response in each.responses]
    assert {bool(response.outputs) for response in responses} == ({True} if backend == "python" else set())
