"""Enumerations and the logger of the fake TensorRT."""

from __future__ import annotations

import enum
from typing import Any


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


class TensorFormat(enum.Enum):
    LINEAR = 0
    CHW4 = 3


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class ILogger:
    """The base class of loggers. As the real one, it wants its `__init__` called."""

    class Severity(enum.Enum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    def __init__(self) -> None:
        self.initialised = True

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


def init_libnvinfer_plugins(logger: Any, namespace: str) -> bool:
    return bool(logger.initialised)
