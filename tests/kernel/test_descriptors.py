"""How many file descriptors there may be, and which of them clients may not keep."""

from __future__ import annotations

import resource

import pytest

from kernel.descriptors import is_reserved, raise_descriptor_limit, reserved_count


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the soft and the hard limit, which functions here see and change in place of the real ones."""
    found = [256, 256]

    def change(number: int, wanted: tuple[int, int]) -> None:
        found[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda number: tuple(found))
    monkeypatch.setattr(resource, "setrlimit", change)
    return found


@pytest.mark.parametrize(("limit", "kept"), [(20, 10), (128, 64), (256, 64), (1024, 128), (4096, 512), (1 << 20, 1024)])
def test_some_descriptors_are_kept_from_clients(limits: list[int], limit: int, kept: int) -> None:
    assert reserved_count(limit) == kept
    limits[:] = limit, limit
    assert [is_reserved(fd) for fd in (0, limit - kept - 1, limit - kept, limit - 1)] == [False, False, True, True]


def test_without_a_limit_none_is_kept(limits: list[int]) -> None:
    limits[:] = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    assert not is_reserved(10**9)
    raise_descriptor_limit()
    assert limits == [resource.RLIM_INFINITY] * 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 30), (1 << 20, 1 << 30)),
        ((1024, resource.RLIM_INFINITY), (1 << 20, resource.RLIM_INFINITY)),
        ((1 << 21, 1 << 22), (1 << 21, 1 << 22)),
    ],
)
def test_the_limit_is_raised_and_never_lowered(
    limits: list[int], before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits[:] = before
    raise_descriptor_limit()
    assert tuple(limits) == after


def test_a_system_that_refuses_the_limit_does_not_end_the_start(
    limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits[:] = 1024, 4096

    def refuse(number: int, wanted: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_descriptor_limit()
    assert limits == [1024, 4096]
