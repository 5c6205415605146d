"""`naiad ready`: which server is asked, and what is wrong with it."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from kernel.errors import BadOption
from kernel.tools.ready import find_problem, missing, own_url, print_ready

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"NAIAD_HTTP_PORT": "9000"}, "http://127.0.0.1:9000"),
        ({"NAIAD_HTTP_ADDRESS": "10.0.0.7"}, "http://10.0.0.7:8000"),
        ({"NAIAD_HTTP_ADDRESS": "::"}, "http://[::1]:8000"),
        ({"NAIAD_LOG_VERBOSE": "1", "OTHER": "x"}, "http://127.0.0.1:8000"),
    ],
)
def test_the_server_is_found_by_the_variables_that_are_its_flags(variables: dict[str, str], url: str) -> None:
    assert own_url(variables) == url


def test_a_server_with_tls_is_asked_with_tls(tmp_path: Path) -> None:
    for name in ("key", "cert"):
        (tmp_path / name).touch()
    variables = {
        "NAIAD_HTTP_USE_SSL": "true",
        "NAIAD_HTTP_SERVER_CERT": f"{tmp_path}/cert",
        "NAIAD_HTTP_SERVER_KEY": f"{tmp_path}/key",
    }
    assert own_url(variables) == "https://127.0.0.1:8000"


def test_a_server_without_http_has_another_check() -> None:
    with pytest.raises(BadOption, match="no HTTP port"):
        own_url({"NAIAD_ALLOW_HTTP": "false"})


@pytest.mark.parametrize("url", ["ftp://localhost", "http://localhost:port", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(BadOption, match=f"'{url}' is not an address of a server"):
        find_problem(url, 1)


def test_a_url_takes_precedence_over_its_variable_and_this_over_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    variables = {"NAIAD_URL": "ftp://variable", "NAIAD_HTTP_PORT": "no number"}
    with pytest.raises(BadOption, match="'ftp://argument'"):
        print_ready("ftp://argument", 1, variables)
    with pytest.raises(BadOption, match="'ftp://variable'"):
        print_ready("", 1, variables)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ""),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "its models are not all ready"),
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", "responded with 403"),
        (b"\0\0\0\0\0\0\0\0\n", "does not respond to HTTP/1.1"),
        (b"", "Remote end closed connection without response"),
    ],
)
def test_what_a_server_responds_is_explained(response: bytes, problem: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def respond() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if not connection.recv(65536):
                        return
                    connection.sendall(response)

        thread = threading.Thread(target=respond)
        thread.start()
        found = find_problem(f"127.0.0.1:{port}", 30)
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()
    assert (problem in found) if problem else not found


def test_a_server_that_does_not_respond_in_time_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert "timed out" in find_problem(f"127.0.0.1:{listener.getsockname()[1]}", 0.05)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (b'[{"name":"a","state":"UNAVAILABLE","reason":"no\\nluck"},{"name":"b","state":"READY"},{"name":"c"}]',
         "\n  a UNAVAILABLE: no"),
        (b'[{"name":"a","state":"LOADING"}]', "\n  a LOADING"),
        (b"[" + b",".join([b'{"name":"a","state":"LOADING"}'] * 7) + b"]", "\n  a LOADING" * 5 + "\n  and 2 more"),
        (b'{"error":"restricted"}', ""),
        (b"", ""),
    ],
)  # fmt: skip
def test_the_models_that_are_not_ready_are_named(index: bytes, text: str) -> None:
    assert missing(index) == text
