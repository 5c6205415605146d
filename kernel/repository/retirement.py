"""Ends versions and instances that were unloaded or replaced: their last requests get a limited time."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kernel.errors import NotFinishedInTime, ServerStopping

if TYPE_CHECKING:
    from collections.abc import Collection

    from kernel.repository.loading import LoadedVersion
    from kernel.repository.placement import InstanceKeeper
    from kernel.serving.catalog import Catalog
    from kernel.serving.model import Model

logger = logging.getLogger(__name__)


#: How long a load waits until the instances that it has removed are finalized, in seconds. An instance that executes
#: for longer continues: the load has succeeded, and the client need not wait for other clients.
FINALIZED_WAIT_S = 5.0


#: How long a worker stays for tensors on its device that other models use, in seconds: callers that still execute use
#: results of their calls. A model may keep a result for ever.
RELEASED_WAIT_S = 30.0


async def finalized(ends: Collection[asyncio.Task[None]]) -> None:
    """Wait until removed instances have been finalized, as Triton does, but no longer than `FINALIZED_WAIT_S`."""
    if ends:
        await asyncio.wait(ends, timeout=FINALIZED_WAIT_S)


class Retirement:
    """Versions and instances that get no new requests, until their workers have ended."""

    def __init__(self, catalog: Catalog, limit_s: float) -> None:
        """After `limit_s` seconds the last requests fail, and the workers are killed."""
        self._catalog = catalog
        self._limit_s = limit_s
        self._versions: dict[Model, LoadedVersion] = {}
        self._keepers: set[InstanceKeeper] = set()

    async def end_version(self, version: LoadedVersion) -> None:
        """Wait for the requests in flight, then end the workers. If it is cancelled, `close` continues with it."""
        model = version.model
        self._versions[model] = version
        self._catalog.retiring.add(model)
        await version.leave()
        in_time = True
        try:
            async with asyncio.timeout(self._limit_s):
                await model.retire()
        except TimeoutError:
            in_time = False
            logger.error(
                "model '%s' version %d was unloaded, and %s have not finished within %g s: its workers are killed",
                model.name, model.version, model.unfinished, self._limit_s,
            )  # fmt: skip
        model.close(NotFinishedInTime(f"model '{model.name}'", self._limit_s))
        if in_time:
            await version.released(RELEASED_WAIT_S)
        await version.stop(at_once=not in_time)
        self._ended(model)

    async def end_instance(self, keeper: InstanceKeeper) -> None:
        """Let an instance of a serving version finish its batches, then end its worker. As `end_version`."""
        self._keepers.add(keeper)
        await keeper.retire(self._limit_s)
        await keeper.released(RELEASED_WAIT_S)
        await keeper.stop()
        self._keepers.discard(keeper)

    async def close(self, *, at_once: bool) -> None:
        """End all that is left now. Requests that are not finished fail with `ServerStopping`."""
        for model in self._versions:
            model.close(ServerStopping(""))
        await asyncio.gather(
            *(version.stop(at_once=at_once) for version in self._versions.values()),
            *(keeper.stop(at_once=at_once) for keeper in self._keepers),
        )
        for model in list(self._versions):
            self._ended(model)
        self._keepers.clear()

    def _ended(self, model: Model) -> None:
        self._versions.pop(model, None)
        self._catalog.retiring.discard(model)
