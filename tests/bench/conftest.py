"""Measurements as a run would have stored them, with numbers that are easy to distinguish."""

from __future__ import annotations

import pytest

from bench import curve, growth
from bench.contenders import OURS, TRITON
from bench.density import COUNTS, Density, DensityPoint, Footprint, Restarts
from bench.load import Sample
from bench.machine import Machine, ProcessMemory
from bench.rows import Figures

MACHINE = Machine("2026-01-02", "abc1234", "Some Processor", 2, 16, "6.1", "3.11.9", {"numpy": "2.4.0"}, 0.1)


def curve_of(servers: tuple[str, ...]) -> curve.Curve:
    points = [
        curve.CurvePoint(load.transport.name, server, load.byte_size, load.clients, 1000.0, 1000.0, 2000.0,
                    [Figures(1000.0, 1000.0, 2000.0, 500)])
        for load in curve.loads(curve.SIZES)
        for server in servers
    ]  # fmt: skip
    return curve.Curve(MACHINE, "a client", 3, "2.51.0" if TRITON in servers else "", points)


def growth_point(
    axis: str, count: int, protocol: str, server: str, rate: float = 5000, cpu: float = 80
) -> growth.GrowthPoint:
    sample = Sample(rate, 500, 900, 10_000, cpu, 40)
    return growth.GrowthPoint(axis, count, protocol, server, rate, 500, 900, cpu, 40, [sample])


def growth_of(servers: tuple[str, ...]) -> growth.Growth:
    points = [
        growth_point(axis.name, count, protocol, server)
        for axis in growth.AXES
        for count in axis.counts
        for protocol in growth.PROTOCOLS
        for server in servers
    ]
    triton = "2.51.0" if TRITON in servers else ""
    return growth.Growth(MACHINE, "a client", 3, 1.5, triton, points, growth.verdicts(points))


def density_of(servers: tuple[str, ...]) -> Density:
    memory = ProcessMemory(40 << 20, 30 << 20, 20 << 20)
    points = [
        DensityPoint(kind, server, count, 0.5 * count, Footprint(memory, count, 20 << 20, 30 << 20, memory),
                     {"http": 5000.0, "grpc": 6000.0})
        for kind in ("python", "onnx")
        for count in COUNTS
        for server in servers
        if (kind, server) != ("onnx", TRITON)
    ]  # fmt: skip
    triton = "2.51.0" if TRITON in servers else ""
    restarts = Restarts([30.0, 20.0, 90.0], [3.0, 2.0, 9.0])
    return Density(
        MACHINE, "a client", 16, 2.0, triton, points, restarts, ["Python with torch: torch is not installed"]
    )


BOTH, ALONE = (OURS, TRITON), (OURS,)


@pytest.fixture(params=[BOTH, ALONE], ids=["with Triton", "ours alone"])
def stored_curve(request: pytest.FixtureRequest) -> curve.Curve:
    return curve_of(request.param)


@pytest.fixture(params=[BOTH, ALONE], ids=["with Triton", "ours alone"])
def stored_growth(request: pytest.FixtureRequest) -> growth.Growth:
    return growth_of(request.param)


@pytest.fixture(params=[BOTH, ALONE], ids=["with Triton", "ours alone"])
def stored_density(request: pytest.FixtureRequest) -> Density:
    return density_of(request.param)
