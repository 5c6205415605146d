"""Options that contradict each other. The effects of flags are in tests/kernel/flags/test_effects.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kernel.errors import BadOption
from kernel.flags.read import DEFAULTS
from kernel.options import AdminOptions, ListenAddress, RepositoryOptions, ServerOptions, check_options

if TYPE_CHECKING:
    from pathlib import Path


def problem(options: ServerOptions) -> str:
    with pytest.raises(BadOption) as caught:
        check_options(options)
    return str(caught.value)


def with_repository(**changes: object) -> ServerOptions:
    repository: RepositoryOptions = msgspec.structs.replace(DEFAULTS.repository, **changes)
    return msgspec.structs.replace(DEFAULTS, repository=repository)


def test_the_defaults_are_valid() -> None:
    check_options(DEFAULTS)


def test_a_repository_that_is_not_a_folder_is_an_error(tmp_path: Path) -> None:
    assert f"'{tmp_path}/no' is not a folder" in problem(with_repository(paths=(tmp_path, tmp_path / "no")))
    check_options(with_repository(paths=(tmp_path / "no",), exit_on_error=False))


def test_models_to_load_need_explicit_mode() -> None:
    message = "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
    assert problem(with_repository(load_models=("a",))) == message
    assert problem(with_repository(load_models=("a",), control_mode="poll")) == message
    check_options(with_repository(load_models=("a",), control_mode="explicit"))
    check_options(with_repository(load_models=("*",), control_mode="explicit"))


def test_a_wildcard_beside_model_names_is_an_error() -> None:
    message = "Wildcard model name '*' must be the ONLY startup model if specified at all."
    assert problem(with_repository(load_models=("*", "a"), control_mode="explicit")) == message


def listeners(**addresses: tuple[bool, str, int]) -> ServerOptions:
    changes = {f"{name}_listener": ListenAddress(*address) for name, address in addresses.items()}
    return msgspec.structs.replace(DEFAULTS, **changes)


def test_two_front_doors_with_the_same_address_and_port_are_an_error() -> None:
    message = problem(listeners(http=(True, "::1", 7), grpc=(True, "::1", 7)))
    assert message == "The server cannot listen to HTTP requests and GRPC requests at the same address and port ::1:7"
    message = problem(listeners(grpc=(True, "h", 7), metrics=(True, "h", 7)))
    assert message == "The server cannot listen to GRPC requests and metrics requests at the same address and port h:7"


def test_closed_front_doors_and_free_ports_do_not_conflict() -> None:
    check_options(listeners(http=(False, "h", 7), grpc=(True, "h", 7)))
    check_options(listeners(http=(True, "h", 0), grpc=(True, "h", 0)))
    check_options(listeners(http=(True, "a", 7), grpc=(True, "b", 7)))


@pytest.mark.parametrize(
    ("admin", "message"),
    [
        (AdminOptions("key"), "--admin-access=key needs --admin-key, the key as @FILE or $VARIABLE"),
        (AdminOptions("open", "secret"), "--admin-key has an effect only with --admin-access=key"),
        (AdminOptions("local", "secret"), "--admin-key has an effect only with --admin-access=key"),
    ],
)
def test_a_key_that_is_missing_or_closes_nothing_is_an_error(admin: AdminOptions, message: str) -> None:
    assert problem(msgspec.structs.replace(DEFAULTS, admin=admin)) == message
    check_options(msgspec.structs.replace(DEFAULTS, admin=AdminOptions("key", "secret")))
