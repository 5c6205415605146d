"""A TensorRT with the real names and an engine format of its own, which executes on `tests.fake_cuda`.

An execution happens when its stream is waited for: who forgets that gets old bytes. Workers use it with
`NAIAD_TENSORRT=tests.fake_tensorrt`. It has what TensorRT 10.13 to 11 have in common, and nothing of what one of them
lacks.
"""

from __future__ import annotations

from tests.fake_tensorrt.building import (
    Builder,
    BuilderFlag,
    HardwareCompatibilityLevel,
    IProgressMonitor,
    MemoryPoolType,
    NetworkDefinitionCreationFlag,
    OnnxParser,
)
from tests.fake_tensorrt.engine import ICudaEngine, Runtime
from tests.fake_tensorrt.execution import IExecutionContext, IOutputAllocator
from tests.fake_tensorrt.names import (
    DataType,
    ExecutionContextAllocationStrategy,
    ILogger,
    TensorFormat,
    TensorIOMode,
    TensorLocation,
    init_libnvinfer_plugins,
)
from tests.fake_tensorrt.plan import VERSION as __version__

__all__ = [
    "Builder",
    "BuilderFlag",
    "DataType",
    "ExecutionContextAllocationStrategy",
    "HardwareCompatibilityLevel",
    "ICudaEngine",
    "IExecutionContext",
    "ILogger",
    "IOutputAllocator",
    "IProgressMonitor",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "Runtime",
    "TensorFormat",
    "TensorIOMode",
    "TensorLocation",
    "__version__",
    "init_libnvinfer_plugins",
]
