"""What a machine lacks is said before anything is imported."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

import pytest

from bench.gpu.collect_wheels import kept, name_of
from bench.gpu.packages import requirement_of, wrong_packages

if TYPE_CHECKING:
    from pathlib import Path

VERSIONS = {"one": "1.2.3", "two": "2.0rc1", "psutil": "7.0", "cuda-bindings": "13.0.1"}
REQUIRES = {"one": ["deep>=3; python_version >= '3.9'", "two<9,>=2.1", "one[more]"], "deep": ["one"]}


def version_of(name: str) -> str:
    if name not in VERSIONS:
        raise importlib.metadata.PackageNotFoundError(name)
    return VERSIONS[name]


def wrong(tmp_path: Path, *dependencies: str) -> list[str]:
    file = tmp_path / "pyproject.toml"
    file.write_text(f"[project]\ndependencies = {[*dependencies]!r}\n")
    return wrong_packages(file, version_of, REQUIRES.get)


def test_what_is_missing_and_too_old_is_said_with_what_needs_it(tmp_path: Path) -> None:
    assert wrong(tmp_path, "one>=1.2", "absent >= 4 ; sys_platform == 'linux'") == [
        "absent 4, which the server needs, is not installed",
        "deep 3, which one needs, is not installed",
        "two 2.0rc1 is installed, and one needs 2.1 or newer",
    ]
    assert wrong(tmp_path, "two") == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("numpy>=1.26", ("numpy", "1.26")),
        ("typing_extensions", ("typing_extensions", "")),
        ("uvloop[dev]>=0.19,<1; sys_platform != 'win32'", ("uvloop", "0.19")),
        ("zstd; python_version < '3.14' and extra == 'speedups'", None),
        ("tomli>=2; python_version < '3.11'", None),
        ("backport; python_version < '99'", ("backport", "")),
        ("colorama; platform_system == 'Windows'", None),
    ],
)
def test_requirements_that_do_not_hold_here_are_left_out(text: str, found: tuple[str, str] | None) -> None:
    assert requirement_of(text) == found


def test_onnxruntime_for_gpus_stands_in_for_the_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(wrong(tmp_path, "onnxruntime>=1.20")) == 1
    monkeypatch.setitem(VERSIONS, "onnxruntime-gpu", "1.31.1")
    assert wrong(tmp_path, "onnxruntime>=1.20") == []


def test_wheels_above_the_limit_are_an_error_that_names_the_largest() -> None:
    wheels = {"numpy-2.0-cp311.whl": 5 << 20, "typing_extensions-4.1-py3-none-any.whl": 1 << 10}
    assert kept(wheels, set(), 6 << 20) == ([*wheels], "")
    assert kept(wheels, {"numpy"}, 1 << 20) == (["typing_extensions-4.1-py3-none-any.whl"], "")
    _, error = kept(wheels, set(), 4 << 20)
    assert error.splitlines()[:2] == [
        "the wheels have 5.0 MiB, and may have 4; the largest are:", "   5.0 MiB  numpy-2.0-cp311.whl",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("typing_extensions-4.16.0-py3-none-any.whl", "typing-extensions"),
        ("nvidia_ml_py-13.615.71-py3-none-any.whl", "nvidia-ml-py"),
        ("cuda-bindings>=12.9", "cuda-bindings"),
        ("h2>=4.1,<5", "h2"),
        ("Numpy", "numpy"),
    ],
)
def test_names_are_compared_as_registries_do(text: str, name: str) -> None:
    assert name_of(text) == name
