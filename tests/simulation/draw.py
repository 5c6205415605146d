"""Draws what most kinds have in common: when clients send requests, how large they are, and whether they stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.model_parameters import AutoscaleSettings
from tests.simulation.plan import Action, RequestPlan

if TYPE_CHECKING:
    from random import Random

    from tests.simulation.plan import ModelPlan

US = 1_000
MS = 1_000_000

#: Times are multiples of this, so that different things often happen at the same time.
GRID_NS = 50 * US

#: Sets of execution times. Fast models get batches ahead of time, see `kernel.serving.instances.FAST_EXECUTION_NS`.
EXECUTION_TIMES = (
    (20 * US, 40 * US),
    (50 * US, 50 * US, 500 * US),
    (400 * US,),
    (1 * MS, 3 * MS),
    (10 * US, 8 * MS),
)

#: Elements in a row. The largest make inputs that do not fit into a message.
WIDTHS = (1, 1, 1, 2, 3, 1500)


def autoscale(random: Random) -> AutoscaleSettings | None:
    """Return settings of a model whose instances follow its load, for one of eight models."""
    if random.randrange(8):
        return None
    return AutoscaleSettings(random.randint(2, 4), 1, time(random, 10 * MS, 30 * MS), time(random, 10 * MS, 60 * MS))


def time(random: Random, least_ns: int, most_ns: int) -> int:
    """Return a time on the grid."""
    return random.randint(-(-least_ns // GRID_NS), most_ns // GRID_NS) * GRID_NS


def arrivals(random: Random, horizon_ns: int, count: int) -> list[int]:
    """Return `count` times: spread evenly, in bursts, or in a row."""
    pattern = random.choice(("spread", "bursts", "row"))
    if pattern == "row":
        gap_ns = random.choice((0, GRID_NS, 4 * GRID_NS))
        start_ns = time(random, GRID_NS, horizon_ns // 2)
        return [start_ns + number * gap_ns for number in range(count)]
    if pattern == "bursts":
        starts = [time(random, GRID_NS, horizon_ns) for _ in range(max(1, count // 8))]
        return sorted(random.choice(starts) for _ in range(count))
    return sorted(time(random, GRID_NS, horizon_ns) for _ in range(count))


def request(random: Random, plan: ModelPlan, **more: object) -> RequestPlan:
    """Return a request for the model, with the values in `more`."""
    spec = plan.spec
    values: dict[str, object] = {
        "rows": random.choice((1, 1, 1, random.randint(1, spec.max_batch_size))) if spec.max_batch_size else 1,
        "width": random.choice(WIDTHS),
        "patience_ns": time(random, GRID_NS, 4 * MS) if random.random() < 0.08 else None,
        "reading_ns": random.choice((0, 0, 0, GRID_NS, 2 * MS)),
        "responses": random.choice((0, 1, 2, 5)) if spec.decoupled else 1,
        "final_with_last": random.random() < 0.5,
        "follow_up": random.random() < 0.05,
    }
    return RequestPlan(**(values | more))  # type: ignore[arg-type]  # by name


def calls(random: Random, plan: ModelPlan, model: int, horizon_ns: int, **more: object) -> list[Action]:
    """Return the requests of clients that know nothing of one another."""
    count = random.choice((3, 8, 15, 30))
    return [
        Action(at_ns, "submit", model, request=request(random, plan, **more))
        for at_ns in arrivals(random, horizon_ns, count)
    ]
