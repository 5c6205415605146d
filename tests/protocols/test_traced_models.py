from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.errors import InvalidArgument, NotFound
from protocols.traced_models import check_traced_model

if TYPE_CHECKING:
    from kernel.serving.kernel import Kernel


class Models:
    """The part of a kernel that is asked: `echo` is ready, `loading` is not, and there are no others."""

    def model_ready(self, name: str) -> bool:
        if name not in ("echo", "loading"):
            raise NotFound("no such model")
        return name == "echo"


KERNEL: Kernel = Models()  # type: ignore[assignment]  # see there


def test_a_ready_model_has_trace_settings() -> None:
    check_traced_model(KERNEL, "echo")


@pytest.mark.parametrize("name", ["loading", "other"])
def test_a_model_that_is_not_ready_is_unknown(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^Request for unknown model : {name}$"):
        check_traced_model(KERNEL, name)
