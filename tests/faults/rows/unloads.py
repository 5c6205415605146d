"""Models that are loaded and unloaded again and again leave nothing (S12b): `python -m tests.faults.rows.unloads`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.machine import memory_of
from bench.server import ServerProcess, wait_for
from tests.faults.models import PAIR, write_echo, write_obey
from tests.faults.requests import post
from tests.faults.row import Finding, Settings
from tests.faults.soak.holdings import kinds_of_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: How much more private memory the server may have at the end.
LIMIT_BYTE_SIZE = 2 << 20

#: Loads before anything is measured: the first ones start a zygote and helpers, and fill caches of modules.
WARM_UP = 20

BODY = '{"inputs": [{"name": "%s", "datatype": "%s", "shape": %s, "data": [1]}]}'


class Unloaded(msgspec.Struct, frozen=True):
    """What was left after the loads and unloads of one backend."""

    backend: str
    count: int
    seconds: float
    memory: int
    descriptors: int
    threads: int
    children: int

    @property
    def wrong(self) -> list[str]:
        found = []
        if self.memory > LIMIT_BYTE_SIZE:
            found.append(f"{self.backend}: private memory {self.memory / (1 << 20):+.1f} MiB")
        more = {name: getattr(self, name) for name in ("descriptors", "threads", "children")}
        return [*found, *(f"{self.backend}: {count:+} {name}" for name, count in more.items() if count > 0)]


def _builtin(root: Path) -> tuple[list[str], str]:
    write_echo(root, "m")
    return ["m"], BODY % ("INPUT0", "UINT8", "[1]")


def _python(root: Path) -> tuple[list[str], str]:
    write_obey(root, name="m", instances=1)
    return ["m"], BODY % ("IN", "INT64", "[1, 1]")


def _ensemble(root: Path) -> tuple[list[str], str]:
    write_echo(root, "echo")
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "config.pbtxt").write_text(PAIR)
    return ["m", "echo"], BODY % ("INPUT0", "UINT8", "[1]")


def _onnx(root: Path) -> tuple[list[str], str]:
    from onnx import TensorProto, helper

    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("IN", "OUT")]
    graph = helper.make_graph([helper.make_node("Identity", ["IN"], ["OUT"])], "g", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "1" / "model.onnx").write_bytes(model.SerializeToString())
    return ["m"], BODY % ("IN", "FP32", "[1]")


def _pytorch(root: Path) -> tuple[list[str], str]:
    import torch

    (root / "m" / "1").mkdir(parents=True)
    torch.jit.script(torch.nn.Identity()).save(str(root / "m" / "1" / "model.pt"))
    (root / "m" / "config.pbtxt").write_text(
        'backend: "pytorch"\ninput [{ name: "IN__0" data_type: TYPE_FP32 dims: [1] }]\n'
        'output [{ name: "OUT__0" data_type: TYPE_FP32 dims: [1] }]\n'
    )
    return ["m"], BODY % ("IN__0", "FP32", "[1]")


BACKENDS: dict[str, Callable[[Path], tuple[list[str], str]]] = {
    "builtin": _builtin,
    "python": _python,
    "onnxruntime": _onnx,
    "ensemble": _ensemble,
}
if importlib.util.find_spec("torch") is not None:
    BACKENDS["pytorch"] = _pytorch


def unloaded(backend: str, folder: Path, count: int) -> Unloaded:
    """Load a model, use it and unload it, `count` times after a warm-up."""
    repository = folder / f"models-{backend}"
    repository.mkdir()
    names, body = BACKENDS[backend](repository)
    with ServerProcess(repository, "--model-control-mode=explicit") as server:
        for _ in range(WARM_UP):
            _cycle(server, names, body)
        memory, descriptors, threads, children = _held(server)
        began = time.monotonic()
        for _ in range(count):
            _cycle(server, names, body)
        seconds = time.monotonic() - began
        # Fewer are right, too: a connection of the warm-up may not have been closed when it was counted.
        wait_for(lambda: _held(server)[1] <= descriptors and _held(server)[3] <= children, 20)
        after = _held(server)
    return Unloaded(
        backend, count, seconds, after[0] - memory, after[1] - descriptors, after[2] - threads, after[3] - children
    )


def _cycle(server: ServerProcess, names: list[str], body: str) -> None:
    for name in reversed(names):
        _succeed(server, f"/v2/repository/models/{name}/load", "{}")
    _succeed(server, f"/v2/models/{names[0]}/infer", body)
    for name in names:
        _succeed(server, f"/v2/repository/models/{name}/unload", "{}")
    wait_for(lambda: not server.workers())


def _succeed(server: ServerProcess, path: str, body: str) -> None:
    status, text = post(server, path, body)
    if status != 200:
        raise AssertionError(f"{path}: {status} {text}")


def _held(server: ServerProcess) -> tuple[int, int, int, int]:
    threads = len(list(Path(f"/proc/{server.pid}/task").iterdir()))
    children = len(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split())
    return memory_of(server.pid).private, kinds_of_descriptors(server.pid).total(), threads, children


def measured(folder: Path, count: int) -> Iterator[Unloaded]:
    """Measure one backend after another."""
    for backend in BACKENDS:
        yield unloaded(backend, folder, count)


def unloads(settings: Settings) -> Finding:
    """S12b: loads and unloads of every backend that is installed."""
    found = list(measured(settings.folder, settings.count(40, 200)))
    parts = [
        f"{each.backend} {each.memory / (1 << 20):+.2f} MiB, {each.descriptors:+} descriptors, {each.threads:+} threads"
        for each in found
    ]
    missing = "" if "pytorch" in BACKENDS else "; pytorch is not installed"
    wrong = [text for each in found for text in each.wrong]
    return Finding(f"{found[0].count} times each: {'; '.join(parts)}{missing}", wrong)


def main() -> int:
    """Print the table. Returns 1 if something was left, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    count = parser.parse_args().count
    print(f"{'backend':>12} {'loads':>6} {'seconds':>8} {'MiB':>7} {'descriptors':>12} {'threads':>8} {'children':>9}")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="naiad-faults-") as temporary:
        for each in measured(Path(temporary), count):
            print(
                f"{each.backend:>12} {each.count:>6} {each.seconds:>8.1f} {each.memory / (1 << 20):>+7.2f} "
                f"{each.descriptors:>+12} {each.threads:>+8} {each.children:>+9}",
                flush=True,
            )
            wrong += each.wrong
    for text in wrong:
        print(f"WRONG: {text}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
