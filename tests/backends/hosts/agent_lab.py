"""An agent and a launcher that uses it, on one event loop, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

from backends.hosts.agent import AgentSettings, HostAgent
from backends.hosts.files import ModelCopies
from backends.hosts.launcher import AgentLauncher
from kernel.repository.execution_environment import EnvironmentSettings
from tests.backends.launch.started_workers import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from backends.hosts.encryption import Encryption
    from kernel.repository.worker_needs import WorkerNeeds


@contextlib.asynccontextmanager
async def agent_running(
    folder: Path,
    settings: AgentSettings | None = None,
    byte_size: int = 1 << 30,
    encryption: Encryption | None = None,
) -> AsyncIterator[tuple[HostAgent, tuple[str, int]]]:
    """Run an agent with its cache in `folder`; yields it and its address."""
    agent = HostAgent(
        settings or AgentSettings("far"),
        ModelCopies(folder, byte_size),
        EnvironmentSettings(str(folder / "e")),
        encryption,
    )
    stop = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(agent.serve(listener, stop))
            try:
                yield agent, listener.getsockname()
            finally:
                stop.set()


@contextlib.asynccontextmanager
async def waiting_launch(launcher: AgentLauncher, needs: WorkerNeeds, part: str) -> AsyncIterator[list[str]]:
    """A launch that says `part`, and goes on waiting until it is cancelled; yields what it has said."""
    texts: list[str] = []
    waiting = asyncio.create_task(launcher.launch("m_0", needs=needs, pending=texts.append))
    try:
        await until(lambda: part in str(texts))
        yield texts
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])


@contextlib.asynccontextmanager
async def launcher_to(
    *addresses: tuple[str, int], token: bytes = b"", encryption: Encryption | None = None
) -> AsyncIterator[AgentLauncher]:
    """A launcher that uses these agents."""
    launcher = AgentLauncher(addresses, token, encryption=encryption)
    await launcher.start()
    try:
        yield launcher
    finally:
        await launcher.close()
