"""What `naiad replay` says where nothing can be sent."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from kernel.command.replay.command import replay_recording
from kernel.command.replay.run import ReplaySettings
from kernel.recording.ring import segment_name
from tests.kernel.command.replay.test_replay_reading import request, write

if TYPE_CHECKING:
    from pathlib import Path


def replay(folder: Path, to: str = "127.0.0.1:1", *models: str, protocol: str = "http") -> int:
    return replay_recording(folder, to, ReplaySettings(), models=models, protocol=protocol, as_json=False, shown=20)


def test_a_folder_without_a_recording_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(tmp_path / "no") == 2
    assert replay(tmp_path) == 2
    (tmp_path / segment_name(1)).write_bytes(b"")
    assert replay(tmp_path) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: '{tmp_path / 'no'}' cannot be read: No such file or directory",
        f"error: there is no recording in '{tmp_path}': no file is called NUMBER.naiadrec",
        f"error: '{tmp_path / segment_name(1)}' has no header: it is empty, or cut",
    ]


def test_models_that_are_there_are_named_where_the_wanted_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 1, request(1, model="a"), request(2, model="b"))
    assert replay(tmp_path, "127.0.0.1:1", "c") == 2
    assert capsys.readouterr().err == f"error: there is no request to c in '{tmp_path}': it has requests to a, b\n"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_target_that_does_not_respond_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], protocol: str
) -> None:
    write(tmp_path, 1, request(1))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert replay(tmp_path, f"127.0.0.1:{port}", protocol=protocol) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: no inference server responds to {protocol.upper().replace('GRPC', 'gRPC')} at ")
    assert f"http://127.0.0.1:{port}" in error
