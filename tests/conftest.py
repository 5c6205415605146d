"""For all tests: no test depends on how fast the machine is, and each leaves the kernel's state consistent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from kernel.serving.instances import InstanceSet

if TYPE_CHECKING:
    from collections.abc import Iterator

settings.register_profile("naiad", deadline=None)
settings.load_profile("naiad")


@pytest.fixture(autouse=True)
def check_requests_and_batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test, recompute the invariants of every model version that it made: see `InstanceSet.check`."""
    made: list[InstanceSet] = []
    make = InstanceSet.__init__

    def make_and_note(self: InstanceSet, *arguments: Any) -> None:
        make(self, *arguments)
        made.append(self)

    monkeypatch.setattr(InstanceSet, "__init__", make_and_note)
    yield
    for instances in made:
        instances.check()
