"""Servers whose repository or models are wrong, and the lines that tools of Triton wait for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bench.server import ServerFailed, ServerProcess

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end.conftest import WriteModel

TENSORS = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""


def test_a_server_without_its_repository_runs_and_says_that_it_is_neither_live_nor_ready(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "none", "--exit-on-error=false") as server:
        assert server.get("/v2/health/live")[0] == 400
        assert server.get("/v2/health/ready")[0] == 400
        status, text = server.get("/v2")
        assert (status, json.loads(text)["name"]) == (200, "triton")
        server.wait_for_log("creating server: Internal - failed to read model repository")


def test_folders_without_a_valid_configuration_do_not_keep_the_server_from_being_ready(
    write_model: WriteModel,
) -> None:
    repository = write_model("wrong", "max_batch_size: [", "")
    (repository / "empty").mkdir()
    with ServerProcess(repository, "--exit-on-error=false") as server:
        assert server.get("/v2/health/ready")[0] == 200
    (repository / "wrong" / "config.pbtxt").write_text('backend: "python"\n' + TENSORS)
    with ServerProcess(repository, "--exit-on-error=false") as server:
        assert server.get("/v2/health/ready")[0] == 400, "the model has a configuration, and cannot be loaded"


def test_the_end_of_a_server_and_a_start_that_fails_have_the_line_that_tools_of_triton_wait_for(
    write_model: WriteModel,
) -> None:
    line = "Waiting for in-flight requests to complete."
    server = ServerProcess(None)
    with server:
        assert line not in server.log
        server.terminate()
        assert server.wait() == 0
        server.wait_for_log(line)
    repository = write_model("broken", TENSORS, "raise RuntimeError('no luck')\n")
    with pytest.raises(ServerFailed) as caught:
        ServerProcess(repository).start()
    assert line in str(caught.value)
