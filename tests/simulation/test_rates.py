"""A batch ahead of time is never worth less than none: no pattern has a lower rate, or a longer wait at low load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.config.spec import DynamicBatching
from tests.simulation.rates import MS, US, Measured, Pattern, measured

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

pytestmark = [pytest.mark.slow, pytest.mark.slow_loop("a pattern of some thousand requests is one piece of work")]

#: What an execution takes with 0 rows and for each row, in microseconds.
MODELS = [(120, 10), (250, 20), (600, 2), (600, 50), (3000, 100)]


def affine(base_us: int, row_us: int) -> Callable[[int, Random], int]:
    """Return execution times that differ by a twentieth of their length."""
    return lambda rows, random: int((base_us + row_us * rows) * US * random.uniform(0.95, 1.05))


def mixed(rows: int, random: Random) -> int:
    """Return a time that nobody can foresee."""
    return random.choice((150 * US, 8 * MS))


def pair(pattern: Pattern, duration_ns: int) -> tuple[Measured, Measured]:
    """Return what clients see with batches ahead of time, and without."""
    return (
        measured(pattern, ahead=True, duration_ns=duration_ns),
        measured(pattern, ahead=False, duration_ns=duration_ns),
    )


@pytest.mark.parametrize("pipelines", [True, False])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_clients_that_wait_for_their_responses_are_served_at_least_as_often(
    model: tuple[int, int], *, pipelines: bool
) -> None:
    for clients in (1, 2, 3, 8, 32):
        pattern = Pattern(execution_ns=affine(*model), clients=clients, batching=DynamicBatching(), pipelines=pipelines)
        with_, without = pair(pattern, 300 * (sum(model) * US))
        assert with_.per_s >= 0.99 * without.per_s, f"{clients} clients: {with_}, {without}"
        assert with_.mean_wait_ns <= 1.01 * without.mean_wait_ns, f"{clients} clients: {with_}, {without}"


@pytest.mark.parametrize("clients", [2, 8, 32])
def test_a_worker_that_pipelines_a_model_of_half_a_millisecond_serves_a_tenth_more(clients: int) -> None:
    pattern = Pattern(execution_ns=affine(500, 20), clients=clients, batching=DynamicBatching())
    with_, without = pair(pattern, 200 * MS)
    assert with_.per_s > 1.1 * without.per_s


@pytest.mark.parametrize("pipelines", [True, False])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_at_low_load_no_request_waits_longer(model: tuple[int, int], *, pipelines: bool) -> None:
    for load in (0.1, 0.3, 0.6):
        gap_ns = int(sum(model) * US / load)
        pattern = Pattern(execution_ns=affine(*model), gap_ns=gap_ns, batching=DynamicBatching(), pipelines=pipelines)
        with_, without = pair(pattern, 2000 * gap_ns)
        assert with_.mean_wait_ns <= 1.01 * without.mean_wait_ns, f"load {load}: {with_}, {without}"


@pytest.mark.parametrize(
    "batching",
    [None, DynamicBatching(max_queue_delay_ns=MS), DynamicBatching(preferred_batch_sizes=(4, 8))],
    ids=["direct", "delay", "preferred"],
)
@pytest.mark.parametrize("clients", [2, 8, 32])
def test_no_rule_of_batching_makes_a_model_slower(batching: DynamicBatching | None, clients: int) -> None:
    for pipelines in (True, False):
        pattern = Pattern(
            execution_ns=affine(600, 50), clients=clients, batching=batching, pipelines=pipelines,
            max_batch_size=16 if batching is not None else 0,
        )  # fmt: skip
        with_, without = pair(pattern, 300 * MS)
        assert with_.per_s >= 0.99 * without.per_s, f"{with_}, {without}"


@pytest.mark.parametrize("clients", [1, 4, 16])
def test_executions_that_nobody_can_foresee_cost_nothing(clients: int) -> None:
    pattern = Pattern(execution_ns=mixed, clients=clients, batching=DynamicBatching())
    with_, without = pair(pattern, 3_000 * MS)
    assert with_.per_s >= 0.95 * without.per_s, f"{with_}, {without}"


@pytest.mark.parametrize("clients", [48, 64])  # fewer wait for copies, not for the device
def test_batches_that_overlap_on_a_gpu_have_1_6_times_the_rate_of_one_at_a_time(clients: int) -> None:
    pattern = Pattern(execution_ns=affine(2000, 0), clients=clients, batching=DynamicBatching(), copy_ns=MS)
    with_, without = pair(pattern, 1_000 * MS)
    assert with_.per_s >= 1.6 * without.per_s, f"{with_}, {without}"


@pytest.mark.parametrize("copy_us", [20, 200, 1000])
@pytest.mark.parametrize("model", [(600, 2), (600, 50), (2000, 0), (3000, 100)], ids=str)
def test_clients_of_a_gpu_are_served_at_least_as_often_when_batches_overlap(
    model: tuple[int, int], copy_us: int
) -> None:
    for clients in (1, 2, 3, 8, 32):
        pattern = Pattern(
            execution_ns=affine(*model), clients=clients, batching=DynamicBatching(), copy_ns=copy_us * US
        )
        with_, without = pair(pattern, 300 * (sum(model) * US))
        assert with_.per_s >= 0.97 * without.per_s, f"{clients} clients: {with_}, {without}"
