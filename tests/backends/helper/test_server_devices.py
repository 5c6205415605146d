"""CUDA regions that clients register: what the log says of those that are refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from backends.helper.server_devices import DeviceRegions
from kernel.errors import InvalidArgument
from shm.region import CudaIpcHandle, Region, RegionKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.helper.process import Helper
    from backends.launch.launcher import Launcher
    from kernel.observe.limited_log import LimitedLog
    from shm.tensor import Span


class RefusingHelper:
    """Cannot open any handle."""

    async def read(self, span: Span) -> Span:
        raise InvalidArgument("the driver says no")


def test_regions_that_are_refused_again_and_again_are_logged_a_few_times(
    caplog: pytest.LogCaptureFixture, log_two_lines: Callable[[str], LimitedLog]
) -> None:
    log_two_lines("backends.helper.server_devices._refusals")
    regions = DeviceRegions(cast("Launcher", None))
    regions.helper = cast("Helper", RefusingHelper())

    async def register(number: int) -> None:
        region = Region(f"r{number}", RegionKind.CUDA, CudaIpcHandle(bytes(64), 0), 64)
        with pytest.raises(InvalidArgument, match="^failed to register shared memory region: invalid args$"):
            await regions.check(region)

    for number in range(5):
        asyncio.run(register(number))
    assert [record.getMessage() for record in caplog.records] == [
        f"the CUDA shared memory region 'r{number}' is not registered: the driver says no" for number in range(2)
    ]
