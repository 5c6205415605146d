"""Settings of backends from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel.errors import InvalidArgument
from kernel.repository.backend_config import (
    backend_config,
    parse_backend_configs,
    with_allowed_pickles,
    with_directory,
)

FORMAT = "--backend-config option format is '<backend name>,<setting>=<value>'. Got "


def test_a_setting_of_one_backend_overrides_that_of_all() -> None:
    configs = parse_backend_configs(
        ["default-max-batch-size=8", "onnxruntime,default-max-batch-size=16", "python,a=1,b=2"]
    )
    assert backend_config(configs, "onnxruntime") == {"default-max-batch-size": "16"}
    assert backend_config(configs, "identity") == {"default-max-batch-size": "8"}
    assert backend_config(configs, "python") == {"default-max-batch-size": "8", "a": "1,b=2"}


def test_every_backend_has_a_default_batch_size() -> None:
    assert backend_config({}, "any") == {"default-max-batch-size": "4"}


def test_the_folder_of_backends_is_a_setting_of_each() -> None:
    configs = with_directory({"": {"a": "1"}, "python": {"b": "2"}}, Path("/srv/backends"))
    assert backend_config(configs, "other")["backend-directory"] == "/srv/backends"
    assert backend_config(configs, "python").keys() >= {"a", "b", "backend-directory"}
    assert with_directory({"": {"backend-directory": "/given"}}, Path("/srv"))[""] == {"backend-directory": "/given"}
    assert with_directory({}, None) == {}


@pytest.mark.parametrize("value", ["", "python", "python,", "python,a", "python,a=", "=", "a=", "python,=1"])
def test_a_wrong_value_is_refused(value: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_backend_configs([value])
    assert caught.value.message == FORMAT + value


def test_a_comma_without_a_backend_is_refused() -> None:
    with pytest.raises(
        InvalidArgument, match="^No backend specified. --backend-config option format is <backend name>,"
    ):
        parse_backend_configs([",a=1"])


@pytest.mark.parametrize("allowed", ["false", "FALSE", "", " "])
def test_pickles_are_allowed_by_nothing_but_their_flag(allowed: str) -> None:
    given = parse_backend_configs(["sklearn,allow-pickle=true", "allow-pickle=true", "sklearn,a=b"])
    assert backend_config(with_allowed_pickles(given, allowed), "sklearn").keys() == {"default-max-batch-size", "a"}
    assert backend_config(with_allowed_pickles(given, "m"), "sklearn")["allow-pickle"] == "m"
