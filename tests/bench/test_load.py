"""The load client and a real server: small loads over both protocols, on several models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.load import LoadNotRun, Spec, run_apart
from bench.models import copy_name, instances_name, write_growing_models
from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    models: Path = tmp_path_factory.mktemp("models")
    write_growing_models(models, 2, (2,))
    with ServerProcess(models) as running:
        yield running


def spec(server: ServerProcess, protocol: str, models: list[str]) -> Spec:
    port = server.http_port if protocol == "http" else server.grpc_port
    return Spec(protocol, port, 3, models, 0.05, server.pid)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_all_connections_are_kept_busy(server: ServerProcess, protocol: str) -> None:
    models = [copy_name(0), copy_name(1), instances_name("add_sub", 2), instances_name("waiting", 2)]
    sample = run_apart(spec(server, protocol, models))
    assert sample.requests > 0
    assert 0 < sample.p50_us <= sample.p99_us


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_error_of_the_server_ends_the_load(server: ServerProcess, protocol: str) -> None:
    with pytest.raises(LoadNotRun, match="unknown model"):
        run_apart(spec(server, protocol, ["missing"]))


def test_a_server_that_is_not_there_ends_the_load(server: ServerProcess) -> None:
    with pytest.raises(LoadNotRun, match="refused"):
        run_apart(Spec("http", 1, 1, ["m"], 0.05, server.pid))
