"""Every input that is kept, those of crashes that were repaired among them, and thousands of mutations, the same each
time. `make fuzz` searches for longer, guided by what it covers."""

from __future__ import annotations

import itertools
import os
from random import Random

import pytest

from tests.fuzz.mutations import corpus, inputs
from tests.fuzz.targets import TARGETS

#: Mutations of each target in `make test`; NAIAD_MUTATIONS asks for more.
MUTATIONS = int(os.environ.get("NAIAD_MUTATIONS", "1500"))


@pytest.mark.slow_loop("nothing runs on an event loop")
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks_a_parser(name: str) -> None:
    seeds = corpus(name)
    assert seeds
    for octets in itertools.islice(inputs(Random(7), seeds), len(seeds) + MUTATIONS):
        try:
            TARGETS[name](octets)
        except Exception as error:
            raise AssertionError(f"{octets!r}: {type(error).__name__}: {error}") from error
