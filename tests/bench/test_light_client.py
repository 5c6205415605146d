"""The light client and a real server: every kind of request is answered rightly, and a wrong answer has no load."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import msgspec
import pytest

from bench.contenders import missing_openssl, tls_flags
from bench.light import LightLoad, LightRequest, run_load
from bench.light_client import BadAnswer, CheckClient, LightClient
from bench.light_rows import BINARY, GRPC, JSON, SHARED, LightRow, Payload, light_rows
from bench.models import LIGHT_MODELS, RULES, write_light_models, write_onnx_models
from bench.rows import Figures
from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = [
    LightRow("binary", Payload(BINARY, "add_sub", 16), "add_sub_onnx", 2),
    LightRow("json", Payload(JSON, "add_sub", 16), "add_sub_onnx", 1),
    LightRow("grpc", Payload(GRPC, "add_sub", 16), "add_sub_onnx", 1, streams=2),
    LightRow("grpc 1 MiB", Payload(GRPC, "identity", 1 << 18), "identity_onnx", 1),
    LightRow("shared", Payload(SHARED, "identity", 1024), "identity_onnx", 1),
    LightRow("mlp", Payload(BINARY, "mlp", 1024), "mlp_onnx", 1),
    next(row for row in light_rows() if "generate" in row.name),
]
TLS_ROWS = [msgspec.structs.replace(row, tls=True) for row in (ROWS[0], ROWS[2])]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    write_onnx_models(folder)
    write_light_models(folder)
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[ServerProcess]:
    with ServerProcess(models) as running:
        yield running


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[LightClient]:
    monkeypatch.setattr("bench.light_client.WARM_UP_S", 0.0)
    with LightClient() as found:
        yield found


def ports(server: ServerProcess) -> dict[str, int]:
    return {"http": server.http_port, "grpc": server.grpc_port}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_right_response_gives_a_load(server: ServerProcess, client: LightClient, row: LightRow) -> None:
    load = client.prepare(row, row.model, ports(server))
    assert isinstance(load, LightLoad), load
    assert (load.connections, load.streams, load.seconds) == (row.connections, row.streams, 1)
    assert load.response_byte_size > 0


@pytest.mark.parametrize("row", [ROWS[0], ROWS[2]], ids=lambda row: row.name)
def test_a_model_with_other_outputs_or_none_gives_the_reason(
    server: ServerProcess, client: LightClient, row: LightRow
) -> None:
    missing = client.prepare(row, "missing", ports(server))
    assert isinstance(missing, str)
    assert "unknown model: 'missing'" in missing
    other = msgspec.structs.replace(row, payload=Payload(row.payload.form, "identity", 16))
    wrong = client.prepare(other, "add_sub_onnx", ports(server))
    assert isinstance(wrong, str)
    assert "INPUT" in wrong


def test_shared_memory_is_checked_registered_again_and_removed(server: ServerProcess) -> None:
    row = ROWS[4]
    with LightClient() as client:
        for _ in range(2):
            assert isinstance(client.prepare(row, row.model, ports(server)), LightLoad)
        files = [*client.files.values()]
        assert [file.stat().st_size for file in files] == [4096, 4096]
    assert not any(file.exists() for file in files)


@pytest.mark.skipif(bool(missing_openssl()), reason=missing_openssl())
def test_a_server_with_a_certificate_answers_over_tls(models: Path, client: LightClient, tmp_path: Path) -> None:
    with ServerProcess(models, *tls_flags(tmp_path).both) as server:
        for row in TLS_ROWS:
            load = client.prepare(row, row.model, ports(server))
            assert isinstance(load, LightLoad), load
            assert load.url.startswith("https://")


def test_a_server_that_is_not_there_is_the_reason(client: LightClient) -> None:
    for row in (ROWS[0], ROWS[2]):
        found = client.prepare(row, row.model, {"http": 1, "grpc": 1})
        assert isinstance(found, str)
        assert "refused" in found


def test_an_http_error_is_no_answer(server: ServerProcess) -> None:
    with CheckClient("http", server.http_port) as client, pytest.raises(BadAnswer, match="status 404"):
        client.exchange(LightRequest("/nothing", b""))


@pytest.mark.skipif(not (shutil.which("wrk") and shutil.which("h2load")), reason="wrk or h2load is not installed")
@pytest.mark.parametrize("row", [ROWS[0], ROWS[2]], ids=lambda row: row.name)
def test_a_load_has_figures(server: ServerProcess, client: LightClient, row: LightRow) -> None:
    load = client.prepare(row, row.model, ports(server))
    assert isinstance(load, LightLoad)
    figures = run_load(load)
    assert isinstance(figures, Figures), figures
    assert 0 < figures.p50_us <= figures.p99_us
    assert figures.requests > 0
    bad = msgspec.structs.replace(load, response_byte_size=load.response_byte_size + 1000)
    assert row.protocol == "http" or "some were errors" in str(run_load(bad))


def test_models_of_other_datatypes_have_rows() -> None:
    assert {row.model for row in light_rows()} >= LIGHT_MODELS.keys()


def test_rows_with_a_traffic_rule_are_decided_by_it(server: ServerProcess, client: LightClient) -> None:
    ruled = [row for row in light_rows() if row.model in RULES]
    assert {row.model for row in ruled} == RULES.keys()
    for row in ruled:
        found = client.prepare(row, row.model, ports(server))
        assert isinstance(found, LightLoad), found
    for name, reason in (("add_sub_by_weight", "weight"), ("add_sub_by_header", "rule")):
        report = json.loads(server.get(f"/v2/models/{name}/traffic")[1])
        assert [each["trouble"] for each in report["targets"]] == [""] * len(report["targets"])
        assert {each["reason"] for each in report["requests"]} == {reason}
