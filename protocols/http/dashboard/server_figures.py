"""Figures of the whole server on the page. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.server_paths import SERVER_PATHS
from kernel.serving.catalog import ModelState
from kernel.serving.front_doors.server_parts import DoorFigures, RepositoryFigures
from kernel.texts import shown_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.serving.front_doors.interface import KernelInterface
    from protocols.http.dashboard.rows import ModelRow
    from shm.region import Region

_MAX_NAME = 256

#: The most bytes of what is wrong with the repositories.
_MAX_TROUBLE = 1024


class ServerRow(msgspec.Struct, frozen=True):
    """What the page shows of the server."""

    #: `starting`, `ready`, `degraded` (a model that should be ready is not), `stopping`, `failed`.
    state: str
    rate: float
    failure_rate: float
    queue: int
    in_flight: int
    models: int
    ready_models: int
    instances: int
    restarts: int
    #: Tensors of all requests, and what they may take, in bytes.
    tensor_byte_size: int
    tensor_limit: int
    regions: int
    region_byte_size: int
    connections: dict[str, int]
    #: Of the kernel process: processors that it keeps busy (None if not known yet), and its memory.
    cpu: float | None
    byte_size: int
    lost_log_lines: int
    #: How much work in the background has ended by an exception.
    background_failures: int
    #: What is wrong with the polls of the repositories, in a sentence; empty if nothing is.
    repository_trouble: str


class RegionRow(msgspec.Struct, frozen=True):
    """A region that a client has registered."""

    name: str
    #: `system` or `cuda`.
    kind: str
    key: str
    byte_size: int
    #: Uses by requests that are not over.
    leases: int


class ServerFigures:
    """Sums over the rows of one snapshot."""

    def __init__(self) -> None:
        self.rate = self.failure_rate = 0.0
        self.queue = self.in_flight = self.models = self.ready_models = self.instances = self.restarts = 0

    def add(self, state: str, row: ModelRow | None) -> None:
        """Add the row of a model version that is in `state`."""
        self.models += bool(state)
        self.ready_models += state == ModelState.READY.value
        if row is not None:
            self.rate += row.rate
            self.failure_rate += row.failure_rate
            self.queue += row.queue
            self.in_flight += row.in_flight
            self.instances += row.serving
            self.restarts += row.restarts


def server_figures(kernel: KernelInterface, sums: ServerFigures, cpu: float | None, byte_size: int) -> ServerRow:
    """Return the figures now; `cpu` and `byte_size` are those of this process."""
    regions = kernel.regions.all()
    repository = next(iter(kernel.part_figures(RepositoryFigures)), RepositoryFigures())
    return ServerRow(
        _state(kernel),
        round(sums.rate, 2),
        round(sums.failure_rate, 2),
        sums.queue,
        sums.in_flight,
        sums.models,
        sums.ready_models,
        sums.instances,
        sums.restarts,
        kernel.budget.used_byte_size,
        kernel.budget.limit_byte_size,
        len(regions),
        sum(region.byte_size for region in regions),
        {door.protocol: door.connections for door in kernel.part_figures(DoorFigures)},
        cpu,
        byte_size,
        kernel.lost_log_lines(),
        repository.background_failures,
        shown_text(SERVER_PATHS.hidden_in(repository.trouble), _MAX_TROUBLE),
    )


def region_rows(regions: Iterable[Region]) -> list[RegionRow]:
    """Return the regions in the order of their names."""
    rows = [
        RegionRow(
            shown_text(region.name, _MAX_NAME),
            region.kind.value,
            shown_text(region.key, _MAX_NAME),
            region.byte_size,
            region.lease_count,
        )
        for region in regions
    ]
    return sorted(rows, key=lambda row: row.name)


def _state(kernel: KernelInterface) -> str:
    if kernel.stopping:
        return "stopping"
    if kernel.start_failed:
        return "failed"
    if kernel.starting:
        return "starting"
    return "ready" if kernel.catalog.all_ready() else "degraded"
