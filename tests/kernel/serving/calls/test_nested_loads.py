from __future__ import annotations

import itertools

import pytest

from kernel.errors import InvalidArgument
from kernel.serving.calls.nested_loads import NestedLoads


def test_models_may_load_others_while_they_are_loaded() -> None:
    loads = NestedLoads()
    loads.begin("a", "b")
    loads.begin("b", "c")
    loads.begin("a", "c")
    loads.end("a", "b")
    loads.begin("b", "a")


@pytest.mark.parametrize("chain", ["aa", "aba", "abca"])
def test_a_load_that_would_wait_for_itself_is_refused(chain: str) -> None:
    loads = NestedLoads()
    for model, loaded in itertools.pairwise(chain[:-1]):
        loads.begin(model, loaded)
    with pytest.raises(InvalidArgument, match=f"model 'a' cannot be loaded by model '{chain[-2]}'"):
        loads.begin(chain[-2], "a")
