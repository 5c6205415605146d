"""Options that contradict each other. What each flag changes is in tests/kernel/command/flags/test_effects.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kernel.command.flags.read import DEFAULTS
from kernel.options import BadOption, ListenAddress, RepositoryOptions, ServerOptions, check_options

if TYPE_CHECKING:
    from pathlib import Path


def problem(options: ServerOptions) -> str:
    with pytest.raises(BadOption) as caught:
        check_options(options)
    return str(caught.value)


def with_repository(**changes: object) -> ServerOptions:
    repository: RepositoryOptions = msgspec.structs.replace(DEFAULTS.repository, **changes)
    return msgspec.structs.replace(DEFAULTS, repository=repository)


def test_the_defaults_are_good() -> None:
    check_options(DEFAULTS)


def test_a_repository_that_is_no_folder_is_told(tmp_path: Path) -> None:
    assert f"'{tmp_path}/no' is not a folder" in problem(with_repository(paths=(tmp_path, tmp_path / "no")))


def test_models_to_load_need_explicit_mode() -> None:
    said = "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
    assert problem(with_repository(load_models=("a",))) == said
    assert problem(with_repository(load_models=("a",), control_mode="poll")) == said
    check_options(with_repository(load_models=("a",), control_mode="explicit"))
    check_options(with_repository(load_models=("*",), control_mode="explicit"))


def test_all_models_cannot_be_asked_for_together_with_some() -> None:
    said = "Wildcard model name '*' must be the ONLY startup model if specified at all."
    assert problem(with_repository(load_models=("*", "a"), control_mode="explicit")) == said


def listeners(**places: tuple[bool, str, int]) -> ServerOptions:
    changes = {f"{name}_listener": ListenAddress(*place) for name, place in places.items()}
    return msgspec.structs.replace(DEFAULTS, **changes)


def test_two_doors_cannot_listen_at_one_place() -> None:
    said = problem(listeners(http=(True, "::1", 7), grpc=(True, "::1", 7)))
    assert said == "The server cannot listen to HTTP requests and GRPC requests at the same address and port ::1:7"
    said = problem(listeners(grpc=(True, "h", 7), metrics=(True, "h", 7)))
    assert said == "The server cannot listen to GRPC requests and metrics requests at the same address and port h:7"


def test_doors_that_are_closed_or_take_any_port_are_in_nobodys_way() -> None:
    check_options(listeners(http=(False, "h", 7), grpc=(True, "h", 7)))
    check_options(listeners(http=(True, "h", 0), grpc=(True, "h", 0)))
    check_options(listeners(http=(True, "a", 7), grpc=(True, "b", 7)))
