"""The rows: each route and RPC is attacked, each attack has the size that it shall have."""

from __future__ import annotations

import re

import pytest

from bench.heavy.attack import HeavyRow, HttpRequest
from bench.heavy.attacker import heavy_rows, row_named
from protocols.grpc.service import CATEGORIES
from protocols.http import routes

ROWS = heavy_rows()
SIZE = 1 << 16


def paths(protocol: str) -> set[str]:
    return {each.path for row in ROWS if row.protocol == protocol for each in row.build(SIZE).requests}


def test_each_row_has_a_name_of_its_own_and_is_found_by_it() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert row_named("http gzip bomb").name == "http gzip bomb"
    with pytest.raises(LookupError, match="no row 'x'"):
        row_named("x")


def test_each_route_that_takes_a_body_is_attacked() -> None:
    tables = (
        routes.LITERAL_ENDPOINTS,
        routes.MODEL_ENDPOINTS,
        routes.REPOSITORY_ENDPOINTS,
        routes.SHARED_MEMORY_ENDPOINTS,
    )
    without_body = routes.MODEL_ENDPOINTS["poison/clear"]  # it is not read
    all_of_them = [
        endpoint
        for table in tables
        for endpoint in table.values()
        if "POST" in endpoint.handlers and endpoint is not without_body
    ]
    attacked = [found[0] for path in paths("http") if (found := routes.find_endpoint(path)) is not None]
    assert [endpoint for endpoint in all_of_them if endpoint not in attacked] == []


def test_each_rpc_is_attacked() -> None:
    assert set(CATEGORIES) - paths("grpc") == set()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_an_attack_grows_with_the_size_and_has_valid_expectations(row: HeavyRow) -> None:
    attack = row.build(SIZE)
    assert {isinstance(each, HttpRequest) for each in attack.requests} == {row.protocol != "grpc"}
    assert 0 < attack.byte_size <= 100 * SIZE
    small = ("bomb", "gzip", "chunks of 1 byte", "a template that")
    if not any(each in row.name for each in small):
        assert attack.byte_size >= SIZE // 16
    re.compile(row.text)
    assert all(row.accepts(status) for status in row.status.split("|"))
    assert not row.accepts("teapot")
