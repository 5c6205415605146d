"""Addresses that people give to commands."""

from __future__ import annotations

import pytest

from kernel.tools.client import ClientError, base_url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("[::1]:8000/", "http://[::1]:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("https://models.example/triton/", "https://models.example/triton"),
    ],
)
def test_a_host_and_port_become_a_url(text: str, url: str) -> None:
    assert base_url(text) == url


def test_an_address_of_another_protocol_is_refused() -> None:
    with pytest.raises(ClientError, match="'grpc://localhost:8001' is not an address of a server"):
        base_url("grpc://localhost:8001")
