"""What a seed decides before anything runs: the models, and what happens to them at which times.

Everything random about clients and faults is drawn here, so that a part of a scenario can be left out and the rest
stays as it was: this is how a failing scenario is shortened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.config.model_parameters import AutoscaleSettings
    from kernel.config.spec import ModelSpec
    from schedulers.ratelimit import InstanceNeeds


class ModelPlan(msgspec.Struct, kw_only=True):
    """A model of a scenario."""

    kind: str
    spec: ModelSpec
    instances: int = 1
    #: How many batches an instance executes at the same time.
    concurrency: int = 1
    #: Executions take one of these times.
    execution_ns: tuple[int, ...] = (1_000_000,)
    #: How many of a hundred requests the model answers with an error.
    failure_percent: int = 0
    #: How long a worker needs to be started again after its loss.
    restart_ns: int = 2_000_000
    #: The number of instances follows the load.
    autoscale: AutoscaleSettings | None = None
    #: What each instance needs of the rate limiter; None if the model is not under it.
    needs: InstanceNeeds | None = None
    #: What it calls while it executes a batch: in each stage these models at the same time.
    calls: tuple[tuple[str, ...], ...] = ()
    #: How many batches of a worker come before the first that makes calls: some of these are dispatched ahead of time.
    batches_without_calls: int = 0
    #: Whether clients call the model. The steps of an ensemble may be for the ensemble alone.
    called: bool = True


class RequestPlan(msgspec.Struct, kw_only=True, frozen=True):
    """A request of a client. Times count from its arrival."""

    rows: int = 1
    #: The size of the variable dimension of the input, where it has one.
    width: int = 1
    #: The size of one element's filling: large inputs lie in an arena.
    priority: int = 0
    timeout_us: int = 0
    #: When the client disconnects; None if it waits for the response.
    patience_ns: int | None = None
    #: How long the client takes to read a response.
    reading_ns: int = 0
    #: The responses of a decoupled model.
    responses: int = 1
    #: Whether the last response of a decoupled model carries the final flag, or an empty one follows it.
    final_with_last: bool = True
    #: How often an iterative model executes it.
    executions: int = 1
    correlation_id: int | str = 0
    start: bool = False
    end: bool = False
    parameters: dict[str, str | int | bool | float] = {}
    #: Whether the client sends the next request of its list in the moment in which it gets this one's final response.
    follow_up: bool = False


class Action(msgspec.Struct, frozen=True):
    """One thing that happens from outside."""

    at_ns: int
    #: A name of `tests.simulation.actions.ACTIONS`.
    verb: str
    #: The number of the model in the scenario.
    model: int = 0
    #: Chooses one of what is there: a worker, a request.
    pick: int = 0
    #: How long it takes, where it has an end.
    duration_ns: int = 0
    request: RequestPlan | None = None


class Scenario(msgspec.Struct):
    """All that a seed decides."""

    seed: int
    models: list[ModelPlan]
    #: In the order of their times.
    actions: list[Action]
    #: How late alarms ring: an event loop that is busy is late.
    lateness_ns: int = 0
    #: Whether what happens from outside comes before alarms of the same time.
    actions_first: bool = False
    #: Whether the last requests of retired versions and instances get no time.
    impatient_unload: bool = False
    #: The limit of each input arena.
    arena_byte_size: int = 1 << 20
