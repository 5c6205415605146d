"""The tables and the picture of peers, from stored rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from bench.peers.command import print_table, summarize, tree_verdicts
from bench.peers.connections import CLOSED, KEEP_ALIVE, PIPELINED, ConnectionPoint, points, verdicts
from bench.peers.measurement import PEERS, PeerDescription, PeerFailure, PeerResults, has_time, merged
from bench.peers.rows import ROWS, PeerSample, applies
from bench.store import read_json, write_json
from tests.bench.conftest import MACHINE

if TYPE_CHECKING:
    from pathlib import Path


def sample(peer: str, workers: int, row: str, rate: float) -> PeerSample:
    return PeerSample(peer, workers, row, rate, 500.0, 900.0, 45.5, 10_000)


def described(name: str, version: str = "1.0") -> PeerDescription:
    return PeerDescription(name, name.title(), {name: version}, "two workers", "https://example.org/", {})


def results(*names: str, rates: tuple[float, ...] = (900.0, 1000.0, 1300.0)) -> PeerResults:
    peers = [peer for peer in PEERS if peer.name in names]
    samples = [
        sample(peer.name, workers, row.name, rate * workers)
        for peer in peers
        for workers in (1, 2)
        for row in ROWS
        if applies(row, peer)
        for rate in rates
    ]
    found = [ConnectionPoint(line, count, depth, [5000.0], 100.0, 300.0) for line, count, depth in points()]
    failures = [PeerFailure("ray", 0, "", "no wheel for this Python")]
    return PeerResults(MACHINE, "wrk 4.1.0", 2, [described(name) for name in names], samples, failures, found)


def test_figures_are_medians_with_the_lowest_and_the_highest_round() -> None:
    rounds = [sample("mosec", 1, "a row", rate) for rate in (900.0, 1300.0, 1000.0)]
    found = summarize([*rounds, sample("mosec", 2, "a row", 5.0)])
    assert found["mosec", 1, "a row"].rate == 1000
    assert (found["mosec", 1, "a row"].lowest, found["mosec", 1, "a row"].highest) == (900, 1300)
    assert found["mosec", 1, "a row"].spread == 0.2
    assert found["mosec", 2, "a row"].rounds == 1


def test_the_tables_have_rates_settings_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(results("naiad", "mosec"))
    printed = capsys.readouterr().out
    assert "add_sub, 16 floats, c=32" in printed
    assert "1,000" in printed
    assert "20%" in printed
    assert "Mosec (mosec 1.0): two workers. See https://example.org/" in printed
    assert "ray was skipped: no wheel for this Python" in printed
    assert "a connection per request: the rate holds" in printed


def test_a_peer_without_the_protocol_has_no_rows_of_grpc_and_perf_analyzer() -> None:
    clients = {peer.name: {row.client for row in ROWS if applies(row, peer)} for peer in PEERS}
    assert clients["naiad"] == {"light", "grpc", "perf_analyzer"}
    assert clients["mosec"] == {"light"}


def test_a_run_that_adds_keeps_the_rounds_of_the_last_one_and_the_order_of_peers() -> None:
    first = results("mosec", "fastapi")
    second = msgspec.structs.replace(results("naiad"), connections=[], failures=[])
    both = merged(first, second)
    assert [peer.name for peer in both.peers] == ["naiad", "mosec", "fastapi"]
    assert len(both.samples) == len(first.samples) + len(second.samples)
    assert both.connections == first.connections
    assert [failure.peer for failure in both.failures] == ["ray"]
    installed = merged(first, msgspec.structs.replace(second, peers=[described("ray")]))
    assert installed.failures == [], "a peer that is installed now was not skipped"


@pytest.mark.parametrize(
    ("done", "spent_s", "fits"), [(0, 0, True), (0, 5000, True), (1, 500, True), (1, 600, False), (2, 780, False)]
)
def test_a_round_is_begun_if_it_fits_into_the_time(done: int, spent_s: float, *, fits: bool) -> None:
    """What comes after all rounds takes 20 s for each of them: two rounds of 500 s take 1040."""
    assert has_time(done, spent_s, 1200, 20) is fits


def test_a_rate_that_falls_by_half_is_a_collapse_unless_the_server_is_not_busy() -> None:
    found = [
        ConnectionPoint(KEEP_ALIVE, 1, 1, [100.0], 1, 1),
        ConnectionPoint(KEEP_ALIVE, 8, 1, [1000.0], 1, 1),
        ConnectionPoint(KEEP_ALIVE, 256, 1, [900.0], 1, 1),
        ConnectionPoint(CLOSED, 8, 1, [1000.0], 1, 1),
        ConnectionPoint(CLOSED, 256, 1, [300.0], 1, 1),
        ConnectionPoint(PIPELINED, 8, 1, [800.0], 1, 1),
        ConnectionPoint(PIPELINED, 8, 32, [], 0, 0, ["errors of sockets"]),
    ]
    assert verdicts(found) == [
        "keep-alive: the rate holds; the lowest is 0.90 of the best, with 256 connections",
        "a connection per request: the rate COLLAPSES; the lowest is 0.30 of the best, with 256 connections",
        "pipelining: the rate COLLAPSES; the lowest is 0.00 of the best, with 8 connections, 32 ahead",
    ]


def test_stored_results_are_read_again(tmp_path: Path) -> None:
    write_json(tmp_path / "peers.json", results("naiad"))
    assert read_json(tmp_path / "peers.json", PeerResults) == results("naiad")


@pytest.mark.parametrize("names", [("naiad",), tuple(peer.name for peer in PEERS)], ids=["ours alone", "all"])
def test_peers_become_two_files(names: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the dependency group `bench`")
    from bench.pictures import draw_peers, save

    png, svg = save(draw_peers(results(*names)), tmp_path / "peers")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in svg.read_bytes()


def test_a_server_of_trees_is_compared_with_ours_and_with_its_goals() -> None:
    samples = [sample("naiad-trees", 1, "c=8", 9000.0), sample("triton-trees", 1, "c=8", 4500.0)]
    slow = msgspec.structs.replace(sample("mlserver-trees", 1, "c=8", 1000.0), p99_us=9000.0)
    late = msgspec.structs.replace(sample("kserve-trees", 1, "c=8", 1000.0), p99_us=1800.0)
    assert tree_verdicts(summarize([*samples, slow, late, sample("kserve-trees", 1, "c=32", 1.0)])) == [
        "c=8, triton-trees: 2.0 times the requests per second, p99 1.0 times shorter (reached: 1.5)",
        "c=8, mlserver-trees: 9.0 times the requests per second, p99 10.0 times shorter (reached: 8 and 5)",
        "c=8, kserve-trees: 9.0 times the requests per second, p99 2.0 times shorter (NOT REACHED: 8 and 5)",
    ]
