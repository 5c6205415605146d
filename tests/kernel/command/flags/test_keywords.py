"""Flags as a Python program gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel.command.flags.keywords import read_keywords
from kernel.options import BadOption, ListenAddress


def test_every_door_is_closed_until_it_is_asked_for() -> None:
    options, notes = read_keywords({}, {})
    assert notes == []
    doors = (options.http_listener, options.grpc_listener, options.metrics_listener)
    assert [(door.allow, door.address) for door in doors] == [(False, "127.0.0.1")] * 3


def test_a_port_opens_its_door() -> None:
    options, _ = read_keywords({"http_port": 0, "grpc": True, "metrics_port": 9}, {})
    assert options.http_listener == ListenAddress(True, "127.0.0.1", 0)
    assert options.grpc_listener == ListenAddress(True, "127.0.0.1", 8001)
    assert options.metrics_listener == ListenAddress(True, "127.0.0.1", 9)


def test_doors_can_be_closed_and_opened_to_others() -> None:
    options, _ = read_keywords({"http_port": 0, "http": False, "allow_grpc": True, "grpc_address": "0.0.0.0"}, {})
    assert not options.http_listener.allow
    assert options.grpc_listener.address == "0.0.0.0"


def test_values_are_those_of_the_flags() -> None:
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


def test_wrong_flags_are_told_as_at_the_command_line() -> None:
    with pytest.raises(BadOption, match="there is no flag --htp-port; did you mean --http-port"):
        read_keywords({"htp_port": 1}, {})
    with pytest.raises(BadOption, match="--http-port"):
        read_keywords({"http_port": "many"}, {})


def test_a_server_within_a_program_does_not_poll_unless_it_is_told_to() -> None:
    assert read_keywords({}, {})[0].busy_poll_us == 0
    assert read_keywords({"busy_poll_us": 100}, {})[0].busy_poll_us == 100
