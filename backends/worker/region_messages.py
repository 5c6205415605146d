"""The memory of others that a worker uses: takes the kernel's messages about regions and arenas."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from backends.transport import wire
from backends.worker.memory import AttachedRegion, CopiedRegion, CopyBuffers, UnmappedRegion

if TYPE_CHECKING:
    from backends.transport.channel import BlockingChannel
    from backends.worker.devices.device_memory import DeviceArenas
    from backends.worker.memory import AttachedRegions
    from backends.worker.output_memory import ArenaOutputs


class RegionMessages:
    """Attaches and detaches regions as the kernel says."""

    def __init__(
        self, channel: BlockingChannel, regions: AttachedRegions, arena: ArenaOutputs, *, private_writes: bool
    ) -> None:
        """Descriptors come over `channel`. `arena` has the worker's outputs.

        With `private_writes`, writes to memory that is not writable are visible only in this process: a model may
        change its inputs.
        """
        self._channel = channel
        self._regions = regions
        self._arena = arena
        self._private_writes = private_writes
        self._copy_buffers = CopyBuffers()
        #: Arenas of the worker on its device; None if it has none.
        self.device_arenas: DeviceArenas | None = None

    @property
    def handlers(self) -> wire.Handlers:
        """The method for each kind of message."""
        return {
            wire.Attach: self._attach,
            wire.AttachDevice: self._attach_device,
            wire.OwnArena: self._own_arena,
            wire.Transfer: self._transfer,
            wire.Chunk: self._chunk,
            wire.Detach: self._detach,
        }

    def _attach(self, message: wire.Attach) -> None:
        fd = self._channel.take_fd()
        if message.copied:
            unmapped = UnmappedRegion(fd, message.byte_size, message.offset, self._copy_buffers)
            self._regions.attach(message.number, unmapped)
            return
        region = AttachedRegion(
            fd,
            message.byte_size,
            message.offset,
            writable=message.writable,
            volatile=message.volatile,
            private_writes=self._private_writes,
        )
        region.steady_byte_size = message.steady_byte_size
        self._regions.attach(message.number, region)

    def _attach_device(self, message: wire.AttachDevice) -> None:
        from backends.worker.devices.device_memory import DeviceRegion  # few servers have such regions

        region = DeviceRegion(
            message.handle, message.byte_size, message.device_id, self._copy_buffers, of_worker=message.of_worker
        )
        self._regions.attach(message.number, region)

    def _own_arena(self, message: wire.OwnArena) -> None:
        if message.arena != wire.OUTPUT_ARENA:
            self._own_device_arena(message)
            return
        # Mapped again, privately: these outputs are inputs now, and other processes may read them too.
        arena = self._arena.arena
        assert arena is not None, "OwnArena before the arena was created"
        fd = os.dup(arena.region.fd)
        region = AttachedRegion(
            fd, arena.region.byte_size, 0, writable=False, volatile=False, private_writes=self._private_writes
        )
        self._regions.attach(message.number, region)

    def _own_device_arena(self, message: wire.OwnArena) -> None:
        assert self.device_arenas is not None, "OwnArena before the arena was created"
        self._regions.attach(message.number, self.device_arenas.region_of(message.arena, self._copy_buffers))

    def _transfer(self, message: wire.Transfer) -> None:
        self._regions.attach(message.number, CopiedRegion(message.byte_size))

    def _chunk(self, message: wire.Chunk) -> None:
        region = self._regions.get(message.number)
        assert isinstance(region, CopiedRegion), f"region {message.number} is not transferred"
        region.write(message.offset, message.data)

    def _detach(self, message: wire.Detach) -> None:
        self._regions.detach(message.number)
