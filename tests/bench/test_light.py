"""Reports of wrk and h2load are read, and a load with errors has no figures. The reports are recorded ones."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from bench import light
from bench.light import LightLoad, LightRequest, parse_h2load, parse_wrk, run_load
from bench.rows import Figures

WRK = """Running 1s test @ http://127.0.0.1:32929/v2/models/add_sub/infer
  1 threads and 8 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   585.29us  463.10us   6.24ms   96.33%
    Req/Sec    15.05k     4.10k   21.40k    70.00%
  Latency Distribution
     50%  509.00us
     75%  642.00us
     90%  739.00us
     99%    3.19ms
  14930 requests in 1.00s, 2.15MB read
Requests/sec:  14920.18
Transfer/sec:      2.15MB
"""
H2LOAD = """starting benchmark...
Main benchmark duration is over for thread #0. Stopping all clients.

finished in 1.00s, 5363.00 req/s, 1.38MB/s
requests: 5363 total, 5371 started, 5363 done, 5363 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 5363 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 1.38MB (1443087) total, 199.02KB (203794) headers (space savings 13.64%), 989.85KB (1013607) data
                     min         max         mean         sd        +/- sd
time for request:      457us      9.18ms      1.45ms      1.15ms    90.81%
time for connect:       90us       194us       153us        33us    75.00%
"""
LOG = "".join(f"1795459824517135\t200\t{1000 + number}\n" for number in range(100)) + "1795459824517136\t-1\t9\n"
LOAD = LightLoad("http", 1, LightRequest("/", b"body"))


def test_the_figures_of_wrk_are_in_microseconds_whatever_the_unit() -> None:
    assert parse_wrk(WRK) == Figures(14920.18, 509, 3190, 14930)


def test_an_error_status_is_a_failure_of_the_load() -> None:
    text = WRK.replace("Requests/sec", "  Non-2xx or 3xx responses: 12\nRequests/sec")
    assert parse_wrk(text) == "12 responses were errors"


def test_an_error_of_a_socket_is_a_failure_of_the_load() -> None:
    text = WRK.replace("Requests/sec", "  Socket errors: connect 0, read 3, write 0, timeout 0\nRequests/sec")
    assert parse_wrk(text) == "errors of sockets: connect 0, read 3, write 0, timeout 0"


def test_a_report_without_requests_has_no_figures() -> None:
    assert parse_wrk(WRK.replace("14930 requests", "0 requests")) == "no request was completed"
    assert parse_wrk("unable to connect to 127.0.0.1:1 Connection refused\n").startswith("unable to connect")  # type: ignore[union-attr]
    assert parse_wrk("") == "wrk printed nothing"


def test_the_figures_of_h2load_are_those_of_its_report_and_its_log() -> None:
    assert parse_h2load(H2LOAD, LOG, response_byte_size=189) == Figures(5363.0, 1050, 1099, 5363)


def test_errors_of_grpc_are_seen_by_the_bytes_that_they_lack() -> None:
    text = "responses have 189 bytes each and not 250: some were errors"
    assert parse_h2load(H2LOAD, LOG, response_byte_size=250) == text


def test_failed_requests_of_h2load_are_a_failure_of_the_load() -> None:
    text = H2LOAD.replace("5363 succeeded, 0 failed", "5360 succeeded, 3 failed")
    assert parse_h2load(text, LOG) == "3 of 5363 requests were errors"
    assert parse_h2load(H2LOAD.replace("5363 done", "0 done"), LOG) == "no request was completed"
    assert parse_h2load(H2LOAD, "") == "h2load has written no latencies"
    assert parse_h2load("Unable to parse URI\n", "") == "Unable to parse URI"


def test_a_program_that_is_not_installed_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert run_load(LOAD) == "wrk is not installed (apt-get install wrk)"
    assert light.missing("grpc") == "h2load is not installed (apt-get install nghttp2-client)"
    assert light.client_versions() == ""


@pytest.mark.parametrize(
    ("protocol", "scheme", "last"), [("http", "https", "Connection: close"), ("grpc", "http", "te: trailers")]
)
def test_a_command_has_the_body_as_a_file_and_every_header(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, protocol: str, scheme: str, last: str
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> None:
        folder = next(each for each in command if each.startswith(("--script=", "--data="))).partition("=")[2]
        (tmp_path / "body").write_bytes(Path(folder).with_name("body").read_bytes())
        commands.append(command)
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", run)
    request = LightRequest("/path", b"body", {"A": "b"})
    load = LightLoad(protocol, 80, request, 4, 2, tls=protocol == "http", keep_alive=protocol != "http")
    assert run_load(load) == f"{light.PROGRAMS[protocol][0]} did not end"
    [command] = commands
    assert command[-1] == f"{scheme}://127.0.0.1:80/path"
    assert {"--header=A: b", f"--header={last}"} <= {*command}
    assert (tmp_path / "body").read_bytes() == b"body"
