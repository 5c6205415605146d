"""Hosts of a drill on this machine: each has a network, a /dev/shm and a temporary folder of its own.

This process is the first host, after `become_first_host`. Others are connected to it by a bridge.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

#: The folder that each host has for itself: copies of models, files of Ray.
OWN = Path("/tmp/naiad-drill")

_NETWORK = "10.77.0"
_INSIDE = "NAIAD_DRILL_INSIDE"


def why_not() -> str:
    """Return why no host can be made here; "" if they can be."""
    tried = subprocess.run(
        [*_unshare(), "ip", "link", "add", "drill", "type", "bridge"], capture_output=True, text=True
    )
    return tried.stderr.strip() if tried.returncode else ""


def _unshare() -> list[str]:
    return ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net", "--mount"]


def become_first_host(arguments: list[str]) -> None:
    """Run `tests.drills` again in namespaces of its own, unless this is that process. Raises `OSError`."""
    if os.environ.get(_INSIDE):
        _own_files()
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "drill", "type", "bridge")
        _ip("addr", "add", f"{_NETWORK}.1/24", "dev", "drill")
        _ip("link", "set", "drill", "up")
        return
    words = [*_unshare(), sys.executable, "-m", "tests.drills", *arguments]
    os.execvpe(words[0], words, {**os.environ, _INSIDE: "1"})


def _own_files() -> None:
    OWN.mkdir(exist_ok=True)
    for folder in ("/dev/shm", str(OWN)):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Host:
    """Another host, until `close`. `number` is the last part of its address, from 2 on."""

    def __init__(self, number: int) -> None:
        self.address = f"{_NETWORK}.{number}"
        self._link = f"drill{number}"
        # It holds the namespaces, and is no process of the host's: its network is the first host's until `nsenter`.
        ready, said = os.pipe()
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", sys.executable, "-c",
             "import os, signal; from tests.drills.hosts import _own_files; _own_files(); "
             f"os.write({said}, b'+'); os.close({said}); signal.pause()"],
            pass_fds=[said],
        )  # fmt: skip
        os.close(said)
        assert os.read(ready, 1) == b"+", "the host was not made"
        os.close(ready)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", str(self._holder.pid))
        _ip("link", "set", self._link, "master", "drill", "up")
        for words in (["addr", "add", f"{self.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"],
                      ["link", "set", "lo", "up"]):  # fmt: skip
            subprocess.run([*self.enter, "ip", *words], check=True)
        self._network = os.readlink(f"/proc/{self._holder.pid}/ns/net")

    @property
    def enter(self) -> list[str]:
        """The words in front of a command that is to run on this host."""
        return ["nsenter", "--target", str(self._holder.pid), "--net", "--mount"]

    def start(self, words: list[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a program there."""
        with log.open("ab") as opened:
            return subprocess.Popen(
                [*self.enter, *words], stdout=opened, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**os.environ, **variables}, start_new_session=True,
            )  # fmt: skip

    def processes(self, word: str = "") -> list[int]:
        """Return the processes that run there, with `word` in their command."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns" / "net") == self._network and word.encode() in (
                    folder / "cmdline"
                ).read_bytes().replace(b"\0", b" "):
                    found.append(int(folder.name))
        return [pid for pid in found if pid != self._holder.pid]

    def kill(self, word: str = "") -> int:
        """Kill these processes at once; all by default. Returns how many."""
        found = self.processes(word)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)

    def cut(self) -> None:
        """Take its link down: nothing arrives, and no connection ends."""
        _ip("link", "set", self._link, "down")

    def connect(self) -> None:
        """Take its link up again."""
        _ip("link", "set", self._link, "up")

    def close(self) -> None:
        """End what runs there."""
        self.kill()
        self._holder.kill()
        self._holder.wait()
