"""An environment of its own for each peer from the package index, in the cache folder, made once.

Nothing is installed anywhere else. `installed.json` in the environment is written last: what an interrupted
installation leaves is made anew.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec

from bench.peers.peer import NotInstalled, PeerServer
from bench.triton import CACHE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FOLDER = CACHE / "peers"

INSTALL_TIMEOUT_S = 900


class Environment(msgspec.Struct, frozen=True):
    """An environment: its folder, and the versions of the packages that the peer asked for."""

    folder: Path
    versions: dict[str, str]

    def program(self, name: str) -> str:
        """Return the path of a program that was installed, for example `python`."""
        return str(self.folder / "bin" / name)


def environment(peer: PeerServer) -> Environment:
    """Return the environment of a peer. It is made if it is not there. Raises `NotInstalled`."""
    folder = FOLDER / peer.name
    record = folder / "installed.json"
    wanted = sorted(peer.requirements)
    if record.exists():
        installed = msgspec.json.decode(record.read_bytes(), type=dict[str, list[str]])
        if installed["requirements"] == wanted:
            return Environment(folder, _versions(installed["frozen"], peer.requirements))
    frozen = _install(folder, wanted)
    record.write_bytes(msgspec.json.encode({"requirements": wanted, "frozen": frozen}))
    return Environment(folder, _versions(frozen, peer.requirements))


def remove(peer: PeerServer) -> None:
    """Remove the environment of a peer, so that its newest version is installed the next time."""
    shutil.rmtree(FOLDER / peer.name, ignore_errors=True)


def _install(folder: Path, requirements: Sequence[str]) -> list[str]:
    python = folder / "bin" / "python"
    if not python.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "-q", *requirements])
    return _run([*pip, "freeze"]).splitlines()


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"the installation did not end within {INSTALL_TIMEOUT_S} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise NotInstalled(lines[-1].strip() if lines else f"{command[-1]} ended with {done.returncode}")
    return done.stdout


def _versions(frozen: Sequence[str], requirements: Sequence[str]) -> dict[str, str]:
    """Return the versions of the named packages in lines of `pip freeze`, in the order of the requirements."""
    found = {_normal(name): version for name, _, version in (line.partition("==") for line in frozen) if version}
    names = [re.split(r"[\[<>=]", requirement)[0] for requirement in requirements]
    return {name: found[_normal(name)] for name in names if _normal(name) in found}


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
