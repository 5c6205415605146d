"""Flags as Python keywords."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel.command.flags.keywords import read_keywords
from kernel.options import BadOption, ListenAddress


def test_every_front_door_is_closed_by_default() -> None:
    options, notes = read_keywords({}, {})
    assert notes == []
    doors = (options.http_listener, options.grpc_listener, options.metrics_listener)
    assert [(door.allow, door.address) for door in doors] == [(False, "127.0.0.1")] * 3


def test_a_port_opens_its_front_door() -> None:
    options, _ = read_keywords({"http_port": 0, "grpc": True, "metrics_port": 9}, {})
    assert options.http_listener == ListenAddress(True, "127.0.0.1", 0)
    assert options.grpc_listener == ListenAddress(True, "127.0.0.1", 8001)
    assert options.metrics_listener == ListenAddress(True, "127.0.0.1", 9)


def test_front_doors_can_be_closed_or_opened_to_other_machines() -> None:
    options, _ = read_keywords({"http_port": 0, "http": False, "allow_grpc": True, "grpc_address": "0.0.0.0"}, {})
    assert not options.http_listener.allow
    assert options.grpc_listener.address == "0.0.0.0"


def test_keywords_have_the_values_of_flags() -> None:
    options, notes = read_keywords(
        {
            "model_repository": [Path("a"), "b"],
            "strict_readiness": False,
            "disable_auto_complete_config": True,
            "exit_timeout_secs": 3,
            "id": None,
        },
        {},
    )
    assert options.repository.paths == (Path("a"), Path("b"))
    assert not options.strict_readiness
    assert not options.repository.auto_complete_config
    assert (options.exit_timeout_s, options.server_id) == (3, "triton")
    assert notes == []
    assert read_keywords({"disable_auto_complete_config": False}, {})[0].repository.auto_complete_config


def test_wrong_keywords_have_the_errors_of_the_command_line() -> None:
    with pytest.raises(BadOption, match="there is no flag --htp-port; did you mean --http-port"):
        read_keywords({"htp_port": 1}, {})
    with pytest.raises(BadOption, match="--http-port"):
        read_keywords({"http_port": "many"}, {})


def test_an_embedded_server_does_not_poll_by_default() -> None:
    assert read_keywords({}, {})[0].busy_poll_us == 0
    assert read_keywords({"busy_poll_us": 100}, {})[0].busy_poll_us == 100
