"""What loading a model needs to know about the GPUs of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.config.gpus import LEAST_CAPABILITY, NO_GPUS, ON_CPU
from kernel.config.gpus import UsableGpus as UsableGpus  # for what implements `ServerGpus`
from kernel.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: The flag that limits how full a GPU may be for another model to be loaded.
LOAD_LIMIT_FLAG = "--model-load-gpu-limit"


class GpuSettings(msgspec.Struct, frozen=True):
    """The flags about GPUs. Names and defaults are tritonserver's."""

    least_capability: float = LEAST_CAPABILITY
    #: Pinned memory of the host for copies of inputs, of all instances on GPUs together, in bytes.
    pinned_byte_size: int = 256 << 20
    #: By GPU: memory for gathered inputs and for tensors to other models that an instance keeps, in bytes.
    pool_byte_sizes: Mapping[int, int] = {}
    #: By GPU: the fraction of its memory that may be in use when an instance is loaded.
    load_limits: Mapping[int, float] = {}
    #: Whether instances that are configured for a GPU run on the CPU.
    on_cpu: bool = False
    #: Whether the instances of a model on a GPU are threads of one process, if their backend can do it.
    threads: bool = True

    @property
    def at_first(self) -> UsableGpus:
        """What is known before anybody has looked for GPUs."""
        return ON_CPU if self.on_cpu else NO_GPUS

    def pool_byte_size(self, device_id: int) -> int:
        """Return what an instance on this GPU keeps."""
        return self.pool_byte_sizes.get(device_id, 64 << 20)


class GpuOptions(msgspec.Struct, frozen=True):
    """The flags about GPUs, as they are given."""

    #: Pinned memory of the host for copies of inputs, of all instances on GPUs together.
    pinned_byte_size: int = 256 << 20
    #: Values of --cuda-memory-pool-byte-size: "gpu:bytes".
    pool_byte_sizes: tuple[str, ...] = ()
    #: Values of --model-load-gpu-limit: "gpu:fraction".
    load_limits: tuple[str, ...] = ()
    #: The lowest compute capability of the GPUs that are used.
    least_capability: float = LEAST_CAPABILITY
    #: Where instances run that are configured for a GPU: `gpu` or `cpu`.
    kind: str = "gpu"
    #: What the instances of a model on a GPU are, if their backend can do both: `threads` or `processes`.
    instances: str = "threads"

    def settings(self) -> GpuSettings:
        """Return the settings. Raises `InvalidArgument`."""
        return GpuSettings(
            self.least_capability,
            self.pinned_byte_size,
            parse_pools(self.pool_byte_sizes),
            parse_load_limits(self.load_limits),
            self.kind == "cpu",
            self.instances == "threads",
        )


class ServerGpus(Protocol):
    """The GPUs of the server. Implemented by `backends.supervision.gpus`."""

    #: Whether there may be a GPU: the library for it is installed, and a driver.
    possible: bool
    settings: GpuSettings

    async def usable(self) -> UsableGpus:
        """Return the GPUs that configurations may name. The first call starts a process that looks for them."""

    @property
    def visible(self) -> str:
        """CUDA_VISIBLE_DEVICES for workers, so that they number the GPUs as the server does; "" to keep it."""

    def obstacle_of(self, backend: str) -> str | None:
        """Return the obstacle that was noted for this backend; None if none was noted, not even an empty one."""

    def note(self, backend: str, obstacle: str) -> None:
        """Note what a worker has said: why the backend cannot compute on a GPU as it is installed; "" if it can.

        From now on `usable` says it, too.
        """

    async def check_room(self, instance: str, device_id: int) -> None:
        """Raise `Unavailable` if the memory of a GPU is so full that no instance may be loaded on it."""


class NoGpus:
    """A server that uses no GPU."""

    possible = False
    visible = ""

    def __init__(self, settings: GpuSettings = GpuSettings()) -> None:  # noqa: B008 - it is frozen
        self.settings = settings

    async def usable(self) -> UsableGpus:
        return NO_GPUS

    def obstacle_of(self, backend: str) -> str | None:
        return ""

    def note(self, backend: str, obstacle: str) -> None:
        raise AssertionError(f"a worker of backend '{backend}' was asked for GPUs, and the server has none")

    async def check_room(self, instance: str, device_id: int) -> None:
        raise AssertionError(f"instance '{instance}' is for GPU {device_id}, but the server has no GPUs")


def usable_gpus(capabilities: Sequence[tuple[int, int]], least: float) -> UsableGpus:
    """Return the GPUs that are new enough; `capabilities` has all of them. Pure."""
    versions = [float(f"{major}.{minor}") for major, minor in capabilities]
    return UsableGpus(tuple(number for number, version in enumerate(versions) if version >= least), least)


def check_room(instance: str, device_id: int, used: int, total: int, limit: float) -> None:
    """Raise `Unavailable` with Triton's text if more than `limit` of a GPU's memory is in use. Pure."""
    if used > total * limit:
        raise Unavailable(
            f"can not create model '{instance}': memory limit set for GPU {device_id} has exceeded, model loading is "
            "rejected."
        )


class PinnedPool:
    """The pinned memory of the host that instances on GPUs may have together. Pure."""

    #: The most that one instance gets, in bytes.
    SHARE = 64 << 20

    #: With less an instance pins nothing that is worth it.
    LEAST = 64 << 10

    def __init__(self, byte_size: int) -> None:
        self.byte_size = byte_size
        self.used_byte_size = 0

    def take(self, instance_count: int = 1) -> int:
        """Return how many bytes an instance of a model with `instance_count` instances may pin. `give` follows.

        The instances of a model get equal parts, and never all that is left: the next model gets a part, too. 0 if what
        is left is not worth it.
        """
        free = self.byte_size - self.used_byte_size
        share = min(self.SHARE, self.byte_size // max(1, instance_count), free // 2)
        if share < self.LEAST:
            return 0
        self.used_byte_size += share
        return share

    def give(self, byte_size: int) -> None:
        """Take back what `take` has returned."""
        self.used_byte_size -= byte_size
        assert self.used_byte_size >= 0, "more was given back than taken"


def parse_pools(values: Iterable[str]) -> dict[int, int]:
    """Parse the values of --cuda-memory-pool-byte-size: `GPU:BYTES`. The last one of a GPU counts.

    Raises `InvalidArgument`.
    """
    return {device: int(size) for device, size in _by_device("--cuda-memory-pool-byte-size", values, whole=True)}


def parse_load_limits(values: Iterable[str]) -> dict[int, float]:
    """Parse the values of --model-load-gpu-limit: `GPU:FRACTION`. The last one of a GPU counts.

    Raises `InvalidArgument` for a fraction that is not within 0 and 1 (Triton).
    """
    limits = dict(_by_device(LOAD_LIMIT_FLAG, values, whole=False))
    for device, limit in limits.items():
        if not 0 <= limit <= 1:
            raise InvalidArgument(
                f"{LOAD_LIMIT_FLAG} argument requires the value of the fraction to be in range [0.0, 1.0]. "
                f"Got {limit:g} for GPU {device}"
            )
    return limits


def _by_device(flag: str, values: Iterable[str], *, whole: bool) -> list[tuple[int, float]]:
    found = []
    for value in values:
        device, colon, number = value.partition(":")
        try:
            if not colon or int(device) < 0:
                raise ValueError
            found.append((int(device), int(number) if whole else float(number)))
        except ValueError:
            kind = "<integer>:<integer>" if whole else "<integer>:<fraction>"
            raise InvalidArgument(f"{flag} option format is '{kind}'. Got {value}") from None
    return found
