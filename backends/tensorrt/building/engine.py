"""Builds an engine from an ONNX file with TensorRT's builder, by calls that TensorRT 10 and 11 have.

Shows how far a build is, and ends it on request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from backends.tensorrt.building.settings import builder_flags, profiles
from backends.tensorrt.signature import EngineSignature, EngineTensor
from kernel.errors import InternalError, InvalidArgument, RequestCancelled, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from backends.tensorrt.building.settings import BuildSettings
    from backends.tensorrt.library import TensorRt
    from backends.tensorrt.signature import Profile


class PhaseDisplay(Protocol):
    """Shows phases of a build, which lie within one another."""

    def phase(self, name: str, parent: str, step_count: int) -> None:
        """A phase begins."""

    def steps(self, name: str, done: int) -> None:
        """The phase has done this many of its steps."""

    def ended(self, name: str) -> None:
        """It has ended."""


def progress_monitor(module: Any, display: PhaseDisplay, cancelled: Callable[[], bool]) -> Any:
    """Return a `tensorrt.IProgressMonitor`. TensorRT calls it from any thread, and takes no exceptions.

    The build ends soon after `cancelled` is true.
    """

    class Monitor(module.IProgressMonitor):  # type: ignore[misc]  # a class that is known only now
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            display.phase(phase_name, parent_phase or "", num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            display.steps(phase_name, step + 1)
            return not cancelled()

        def phase_finish(self, phase_name: str) -> None:
            display.ended(phase_name)

    return Monitor()


class NoDisplay:
    """Shows nothing, because standard error is not a terminal."""

    def phase(self, name: str, parent: str, step_count: int) -> None:
        """See `PhaseDisplay`."""

    def steps(self, name: str, done: int) -> None:
        """See `PhaseDisplay`."""

    def ended(self, name: str) -> None:
        """See `PhaseDisplay`."""


class BarDisplay:
    """A bar of `rich.progress` for each phase that is going on. A `PhaseDisplay`."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._tasks: dict[str, Any] = {}
        self._depths: dict[str, int] = {}

    def phase(self, name: str, parent: str, step_count: int) -> None:
        depth = self._depths[name] = self._depths.get(parent, -1) + 1
        self._tasks[name] = self._progress.add_task(f"{'  ' * depth}{name}", total=max(step_count, 1))

    def steps(self, name: str, done: int) -> None:
        if name in self._tasks:
            self._progress.update(self._tasks[name], completed=done)

    def ended(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            self._progress.remove_task(task)


_STRONGLY_TYPED = "STRONGLY_TYPED"


class BuiltEngine(msgspec.Struct, frozen=True):
    """The bytes of a plan, and what the engine in it takes and gives."""

    plan: bytes
    signature: EngineSignature
    #: The timing cache after the build; empty if none was asked for.
    timing_cache: bytes = b""


def build_engine(
    tensorrt: TensorRt, settings: BuildSettings, display: PhaseDisplay, cancelled: Callable[[], bool]
) -> BuiltEngine:
    """Build the engine; takes seconds to hours.

    Raises `InvalidArgument` with the parser's errors or for wrong settings, `Unsupported` for what this TensorRT cannot
    do, `InternalError` if the build fails, `RequestCancelled` if it was ended.
    """
    module = tensorrt.module
    flags = builder_flags(settings, {name for name in dir(module.BuilderFlag) if name.isupper()}, tensorrt.version)
    builder = module.Builder(tensorrt.logger)
    if builder is None:
        raise InternalError(f"TensorRT cannot build engines here: {tensorrt.log.take_errors()}")
    network = builder.create_network(_network_flags(module, settings))
    parser = module.OnnxParser(network, tensorrt.logger)
    if not parser.parse_from_file(str(settings.onnx_file)):
        raise _parser_errors(parser, settings.onnx_file)
    tensors = _tensors(network)
    signature = EngineSignature(
        {tensor.name: tensor for tensor in tensors},
        tuple(profiles(settings, [tensor for tensor in tensors if tensor.is_input])),
    )
    config = builder.create_builder_config()
    _configure(module, config, settings, flags)
    for profile in signature.profiles:
        _add_profile(builder, config, profile, signature)
    cache = _use_timing_cache(config, settings.timing_cache)
    config.progress_monitor = progress_monitor(module, display, cancelled)
    tensorrt.log.take_errors()
    plan = builder.build_serialized_network(network, config)
    if cancelled():
        raise RequestCancelled("the build was ended")
    if plan is None:
        raise InternalError(f"the engine cannot be built: {tensorrt.log.take_errors() or 'TensorRT gives no reason'}")
    new_cache = bytes(config.get_timing_cache().serialize()) if cache is not None else b""
    return BuiltEngine(bytes(plan), signature, new_cache)


def _network_flags(module: Any, settings: BuildSettings) -> int:
    """Return the flags of the network. In TensorRT 11 all networks are strongly typed."""
    if not settings.strongly_typed:
        return 0
    flag = getattr(module.NetworkDefinitionCreationFlag, _STRONGLY_TYPED, None)
    return 0 if flag is None else 1 << int(flag)


def _parser_errors(parser: Any, path: Path) -> InvalidArgument:
    """Return an error with all that the parser says, a line for each."""
    lines = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        name, operator = error.node_name(), error.node_operator()
        node = f"node '{name or error.node()}' ({operator}): " if name or operator else ""
        lines.append(f"  {node}{error.desc()}")
    reasons = "\n".join(lines) or "  the parser gives no reason"
    return InvalidArgument(f"TensorRT cannot use '{path}':\n{reasons}")


def _tensors(network: Any) -> list[EngineTensor]:
    inputs = [(network.get_input(index), True) for index in range(network.num_inputs)]
    outputs = [(network.get_output(index), False) for index in range(network.num_outputs)]
    return [
        EngineTensor(
            name=tensor.name,
            is_input=is_input,
            engine_type=tensor.dtype.name,
            dims=tuple(int(dim) for dim in tensor.shape),
            is_shape_tensor=bool(tensor.is_shape_tensor),
            on_host=bool(tensor.is_shape_tensor),
        )
        for tensor, is_input in (*inputs, *outputs)
    ]


def _configure(module: Any, config: Any, settings: BuildSettings, flags: Any) -> None:
    for name in flags:
        config.set_flag(getattr(module.BuilderFlag, name))
    if settings.workspace_byte_size:
        config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, settings.workspace_byte_size)
    if settings.hardware_compatibility != "NONE":
        level = getattr(module.HardwareCompatibilityLevel, settings.hardware_compatibility, None)
        if level is None:
            raise Unsupported("this TensorRT does not have that level of hardware compatibility: choose ampere+")
        config.hardware_compatibility_level = level
    if settings.compute_capability:
        if not hasattr(config, "num_compute_capabilities"):
            raise Unsupported(
                "--compute-capability is for TensorRT for RTX only; TensorRT builds for the GPU of this machine"
            )
        name = f"SM{settings.compute_capability.replace('.', '')}"
        capability = getattr(module.ComputeCapability, name, None)
        if capability is None:
            raise InvalidArgument(f"this TensorRT cannot build for compute capability {settings.compute_capability}")
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)


def _add_profile(builder: Any, config: Any, profile: Profile, signature: EngineSignature) -> None:
    made = builder.create_optimization_profile()
    for name, extent in profile.dims.items():
        if signature.tensors[name].is_dynamic:
            made.set_shape(name, extent.minimum, extent.optimum, extent.maximum)
    for name, extent in profile.values.items():
        made.set_shape_input(name, extent.minimum, extent.optimum, extent.maximum)
    if config.add_optimization_profile(made) < 0:
        raise InvalidArgument(f"TensorRT refuses optimization profile {profile.index}")


def _use_timing_cache(config: Any, path: Path | None) -> Any:
    """Let the build use the times of an earlier one; None if no file is named. One that does not fit is ignored."""
    if path is None:
        return None
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    cache = config.create_timing_cache(data)
    if not config.set_timing_cache(cache, False):  # of another version or device
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache
