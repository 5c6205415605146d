"""Rows are chosen by patterns, left out with a reason, and put together by the servers that they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench import chosen, triton
from bench.chosen import by_servers, choose, matches
from bench.light_rows import CPP, light_rows
from bench.rows import PERF_ANALYZER, all_rows
from bench.triton import NotAvailable, onnx_backend

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "missing", lambda _: "")
    monkeypatch.setattr(chosen, "missing_openssl", lambda: "")


def test_a_name_matches_one_of_several_patterns() -> None:
    assert matches("", "small http c=8")
    assert matches("grpc, c=8", "small http c=8")
    assert not matches("grpc,c=1", "small http c=8")
    assert matches(",", "anything")


def test_every_row_is_chosen_and_has_a_name_of_its_own() -> None:
    found = choose("")
    names = [row.name for row in found.rows]
    assert names == [row.name for row in all_rows()] + [row.name for row in light_rows()]
    assert len({*names}) == len(names)
    assert found.skipped == {}
    assert found.need_perf_analyzer
    assert found.need_tls


def test_rows_that_need_no_perf_analyzer_do_not_ask_for_it() -> None:
    found = choose("light json,onnx_cpp")
    assert {row.group for row in found.rows} == {"light client", CPP}
    assert not found.need_perf_analyzer
    assert not found.need_tls


def test_rows_without_their_program_are_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chosen, "missing", lambda protocol: "no wrk" if protocol == "http" else "")
    monkeypatch.setattr(chosen, "missing_openssl", lambda: "no openssl")
    found = choose("", no_cpp="no backend")
    assert {row.group for row in found.rows} == {PERF_ANALYZER, "light client"}
    assert {*found.skipped.values()} == {"no wrk", "no openssl", "no backend"}
    assert {row.name for row in found.rows} | found.skipped.keys() == {row.name for row in choose("").rows} | {
        *found.skipped
    }
    found.print_skipped()
    assert "1 rows are skipped (light add_sub grpc tls c=8): no openssl" in capsys.readouterr().out


def test_rows_with_tls_come_last_because_they_need_other_servers() -> None:
    plain, tls = by_servers(choose("").rows)
    assert [row.tls for row in (*plain, *tls)] == [False] * len(plain) + [True] * len(tls)
    assert by_servers([]) == []


def test_triton_has_no_tls_over_http() -> None:
    assert [row.name for row in light_rows() if not row.on_triton] == ["light add_sub binary tls c=8"]


def test_a_folder_with_the_backend_is_named_or_the_error_says_how(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(triton.ONNX_BACKEND, str(tmp_path))
    with pytest.raises(
        NotAvailable, match=f"in {tmp_path}: build it .*, or name their folder in {triton.ONNX_BACKEND}"
    ):
        onnx_backend()
    (tmp_path / "libtriton_onnxruntime.so").touch()
    assert onnx_backend() == tmp_path
