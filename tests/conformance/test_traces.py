"""Our traces beside those of a real Triton, which `python -m bench.oracle.traces --record` has recorded."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("tritonclient.grpc")

from bench.oracle.traces import RECORDED, REQUESTS, differences, ours

pytestmark = pytest.mark.conformance


def test_trees_of_traces_have_tritons_activities_and_tensors() -> None:
    wanted = json.loads(RECORDED.read_text())
    assert {key.split()[1] for key in wanted} == REQUESTS.keys() - {"refused"}, "a refused request has no trace"
    found = differences(ours(), wanted)
    assert not found, "\n".join(found)
