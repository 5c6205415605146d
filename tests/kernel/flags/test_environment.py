"""Flags as environment variables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.errors import BadOption
from kernel.flags.read import DEFAULTS, FLAGS, read_flags, variable_of

if TYPE_CHECKING:
    from kernel.options import ServerOptions


def read(variables: dict[str, str], *words: str) -> tuple[ServerOptions, list[str]]:
    return read_flags(words, variables, variables=True)


def problem(variables: dict[str, str], *words: str) -> str:
    with pytest.raises(BadOption) as caught:
        read(variables, *words)
    return str(caught.value)


def test_every_flag_has_a_variable_of_its_own() -> None:
    names = [variable_of(flag) for flag in FLAGS.values()]
    assert len(set(names)) == len(names)
    assert "NAIAD_MODEL_CONTROL_MODE" in names


def test_a_variable_is_as_good_as_its_flag() -> None:
    options, notes = read({"NAIAD_HTTP_PORT": "9000", "NAIAD_ALLOW_GRPC": "false", "NAIAD_ID": "a;b", "HTTP_PORT": "1"})
    assert (options.http_listener.port, options.grpc_listener.allow, options.server_id) == (9000, False, "a;b")
    assert notes == []


def test_the_command_line_takes_precedence() -> None:
    variables = {"NAIAD_HTTP_PORT": "9000", "NAIAD_MODEL_REPOSITORY": "/a;/b"}
    options, _ = read(variables, "--http-port=9001", "--model-repository=/c")
    assert (options.http_listener.port, options.repository.paths) == (9001, (Path("/c"),))


@pytest.mark.parametrize("text", ["/a; /b", "/a\n/b\n"])
def test_several_values_of_a_variable_have_semicolons_or_line_ends_between_them(text: str) -> None:
    options, _ = read({"NAIAD_MODEL_REPOSITORY": text})
    assert options.repository.paths == (Path("/a"), Path("/b"))


def test_a_flag_without_a_value_is_a_switch_as_a_variable() -> None:
    name = "NAIAD_DISABLE_AUTO_COMPLETE_CONFIG"
    assert not read({name: "true"})[0].repository.auto_complete_config
    assert read({name: "false"})[0].repository.auto_complete_config
    assert problem({name: "yes"}) == f"environment variable {name}: 'yes' is neither true nor false"


def test_a_wrong_value_names_the_variable() -> None:
    assert problem({"NAIAD_HTTP_PORT": "many"}) == "environment variable NAIAD_HTTP_PORT: 'many' is not a whole number"


def test_an_empty_variable_is_none() -> None:
    assert read({"NAIAD_HTTP_PORT": "", "NAIAD_LOAD_MODEL": ""}) == (DEFAULTS, [])


def test_a_variable_that_is_no_flag_is_named_in_the_log_with_the_one_that_was_meant() -> None:
    _, notes = read({"NAIAD_HTTP_PROT": "1", "NAIAD_COLOUR": "blue"})
    assert notes == [
        "the environment variable NAIAD_COLOUR has no effect: it stands for no flag",
        "the environment variable NAIAD_HTTP_PROT has no effect: it stands for no flag; did you mean NAIAD_HTTP_PORT?",
    ]


def test_variables_that_kubernetes_makes_of_services_are_left_alone() -> None:
    variables = {
        "NAIAD_SERVICE_HOST": "10.0.0.7",
        "NAIAD_SERVICE_PORT": "8000",
        "NAIAD_SERVICE_PORT_HTTP": "8000",
        "NAIAD_PORT": "tcp://10.0.0.7:8000",
        "NAIAD_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "NAIAD_PORT_8000_TCP_ADDR": "10.0.0.7",
        "NAIAD_HTTP_PORT": "tcp://10.0.0.7:8000",
        "NAIAD_HTTP_SERVICE_HOST": "10.0.0.7",
    }
    assert read(variables) == (DEFAULTS, [])


def test_only_the_command_line_reads_variables() -> None:
    assert read_flags((), {"NAIAD_HTTP_PORT": "9000"}) == (DEFAULTS, [])
