"""Health checks of models: a model may have one (`is_ready` of a Python model, as in Triton since 2026-03).

The front doors use them when a client asks whether a model or the server is ready. An unhealthy model still executes
requests.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

logger = logging.getLogger(__name__)


class HealthCheck(Protocol):
    """Asks one instance whether it is healthy."""

    async def problem(self) -> str:
        """Return why the instance is not ready; empty if it is. Takes some seconds at most."""


class ModelHealth:
    """The health checks of a model version: one for each instance whose model has a check, by the instance's name."""

    def __init__(self) -> None:
        self._checks: dict[str, HealthCheck] = {}
        #: What was wrong with each instance when it was asked last. The log has each change.
        self._problems: dict[str, str] = {}

    def add(self, instance: str, check: HealthCheck) -> None:
        """Add the check of an instance. It replaces a check of the same name: the worker was started again."""
        self._checks[instance] = check

    def remove(self, instance: str, check: HealthCheck) -> None:
        """Remove the check of an instance, unless another worker has replaced it."""
        if self._checks.get(instance) is check:
            del self._checks[instance]
            self._problems.pop(instance, None)

    def __bool__(self) -> bool:
        """Whether there is a check."""
        return bool(self._checks)

    async def ready(self) -> bool:
        """Ask all instances at the same time. The model is ready if each of them is."""
        names, checks = list(self._checks), list(self._checks.values())
        problems = await asyncio.gather(*(check.problem() for check in checks))
        for name, check, problem in zip(names, checks, problems, strict=True):
            if self._checks.get(name) is check:
                self._note(name, problem)
        return not any(problems)

    def _note(self, name: str, problem: str) -> None:
        if problem and problem != self._problems.get(name):
            logger.warning("%s", problem)
        elif not problem and name in self._problems:
            logger.info("Model '%s' is ready again (user-defined check)", name)
        if problem:
            self._problems[name] = problem
        else:
            self._problems.pop(name, None)
