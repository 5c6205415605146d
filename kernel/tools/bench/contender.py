"""`BenchContender`: a server that is measured: its requests are prepared, its load processes run, its rows are kept."""

from __future__ import annotations

import contextlib
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel.tools.bench.inputs import RANDOM, ZERO, InputShapes, file_values, generated_values
from kernel.tools.bench.messages import LoadSetup
from kernel.tools.bench.processes import LoadProcesses
from kernel.tools.bench.regions import BenchRegions
from kernel.tools.bench.requests import FIRST_SEQUENCE_ID, BenchInput, BenchOutput, BenchRequest, encode_all
from kernel.tools.bench.results import BenchRun, PointRow, point_row, server_times
from kernel.tools.bench.target import TargetSettings, open_target, state_module, wrong_response
from kernel.tools.client import ClientError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.tools.bench.messages import PointResult
    from kernel.tools.bench.options import BenchLevel, BenchSettings

#: All load processes, also of another run at the same time, use different ids for their sequences.
_IDS_OF_PROCESS = 1 << 34


class BenchContender:
    """One server. Leave the `with` block to end its load processes and remove its regions."""

    def __init__(self, address: str, settings: BenchSettings) -> None:
        self._settings = settings
        self._address = address
        self._stack = ExitStack()
        self.rows: list[PointRow] = []
        self.notes: list[str] = []

    def __enter__(self) -> BenchContender:
        try:
            self._prepare()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _prepare(self) -> None:
        """Ask the server for the model, make the requests, try one, and start the load processes."""
        settings = self._settings
        of_target = TargetSettings(
            settings.model, settings.version, settings.protocol, settings.headers, settings.streaming, settings.tensors
        )
        self.target = target = open_target(self._address, of_target)
        self._stack.callback(target.close)
        self._server = target.server()
        metadata, self.config = target.metadata(), target.config()
        self._check_kind()
        values = self._values(metadata)
        connections = max(level.connections for level in settings.levels)
        sequences = bool(settings.sequence_length)
        base = BenchRequest(settings.model, settings.version, [], parameters=self._parameters())
        one = encode_all(target.encode, base, values[:1], [], sequences=sequences)[-1]
        outputs = target.probe(one)
        if wrong := wrong_response(outputs, metadata):
            raise ClientError(f"the first response is not what the model's metadata says: {wrong}")
        places: list[list[BenchOutput]] = [[]]
        if settings.shared_memory:
            regions = self._stack.enter_context(contextlib.closing(BenchRegions(target)))
            values = regions.place_inputs(values)
            sizes = {each.name: settings.output_byte_size or each.byte_size or 0 for each in outputs}
            if not all(sizes.values()):
                raise ClientError("--shared-memory: the size of the outputs is unknown; give --output-bytes")
            places = regions.place_outputs(sizes, connections)
            target.probe(encode_all(target.encode, base, values[:1], places[0], sequences=sequences)[-1])
        requests = [encode_all(target.encode, base, values, outputs, sequences=sequences) for outputs in places]
        processes = min(settings.processes, connections)
        self._processes = self._stack.enter_context(
            contextlib.closing(LoadProcesses([self._setup(requests, each, processes) for each in range(processes)]))
        )

    def _check_kind(self) -> None:
        settings, config = self._settings, self.config or {}
        self._decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        if self._decoupled and not settings.streaming:
            raise ClientError(
                f"model '{settings.model}' is decoupled: a request has any number of responses; give --streaming"
            )
        if config and settings.sequence_length and "sequence_batching" not in config and not config.get("platform"):
            self.notes.append(f"model '{settings.model}' has no sequence_batching: the flags of sequences do nothing")
        if "sequence_batching" in config and not settings.sequence_length:
            raise ClientError(f"model '{settings.model}' takes sequences of requests; give --sequence")
        if (
            settings.streaming
            and self.target.protocol == "http"
            and (settings.shared_memory or settings.sequence_length)
        ):
            raise ClientError("--streaming over HTTP has no sequences and no shared memory; take --protocol grpc")

    def _values(self, metadata: dict[str, Any]) -> list[list[BenchInput]]:
        settings = self._settings
        shapes = InputShapes(metadata, self.config, settings.shapes, settings.batch)
        if settings.input in (RANDOM, ZERO):
            values = generated_values(shapes, settings.input)
        else:
            values = file_values(shapes, Path(settings.input))
        if shapes.guessed and settings.input in (RANDOM, ZERO):
            self.notes.append(
                f"dimensions of any size were 1 in {', '.join(dict.fromkeys(shapes.guessed))}: --shape changes that"
            )
        return values

    def _parameters(self) -> dict[str, Any]:
        final = self._settings.streaming and self._decoupled and self.target.protocol == "grpc"
        return {"triton_enable_empty_final_response": True} if final else {}

    def _setup(self, requests: list[list[list[bytes]]], number: int, processes: int) -> LoadSetup:
        settings, target = self._settings, self.target
        own = requests[number::processes] if len(requests) > 1 else requests
        of_run = int.from_bytes(os.urandom(2)) % (1 << 14)
        return LoadSetup(
            protocol_module=state_module(target.protocol),
            host=target.host,
            port=target.port,
            head=target.head(),
            streaming=settings.streaming,
            has_final=bool(self._parameters()),
            requests=own,
            sequence_length=settings.sequence_length,
            first_sequence=FIRST_SEQUENCE_ID + of_run * _IDS_OF_PROCESS + number * (_IDS_OF_PROCESS // 256),
            timeout_s=settings.timeout_s,
        )

    def measure(self, level: BenchLevel, progress: Callable[[int, int], None]) -> None:
        """Run one load and keep its row. If the keyboard interrupts it, keep what was measured, and raise again."""
        settings, processes, target = self._settings, self._processes, self.target
        results: list[PointResult] = []
        before = after = None
        measure_ns = processes.begin(
            level.connections, warmup_s=settings.warmup_s, duration_s=settings.duration_s, rate=level.rate,
            distribution=settings.distribution,
        )  # fmt: skip
        stopped = False
        try:
            results += processes.collect(progress, measure_ns)
            before = target.statistics()
            results += processes.collect(progress, measure_ns + round(settings.duration_s * 1e9))
            after = target.statistics()
            results += processes.collect(progress)
        except KeyboardInterrupt:
            stopped = True
            processes.stop()
            after = target.statistics() if before is not None else None
            results += processes.results_so_far()
            results += processes.collect(progress)
        self.rows.append(
            point_row(
                results, settings.percents, connections=level.connections, target_rate=level.rate,
                server=server_times(before, after), stopped=stopped,
            )
        )  # fmt: skip
        if stopped:
            raise KeyboardInterrupt

    def run(self) -> BenchRun:
        """Return what was measured so far."""
        server = " ".join(str(self._server[key]) for key in ("name", "version") if self._server.get(key))
        settings = self._settings
        return BenchRun(
            label=self.target.label,
            server=server or "a server without a name",
            protocol=self.target.protocol,
            model=settings.model + (f":{settings.version}" if settings.version else ""),
            batch=settings.batch,
            kind=kind_text(settings),
            points=[row for row in self.rows if row.completed or not row.stopped],
            notes=self.notes,
        )


def kind_text(settings: BenchSettings) -> str:
    """Return in words what is special about the requests."""
    parts: Sequence[str] = [
        f"batches of {settings.batch}" if settings.batch > 1 else "",
        "streaming" if settings.streaming else "",
        f"sequences of {settings.sequence_length}" if settings.sequence_length else "",
        "shared memory" if settings.shared_memory else "",
        f"tensors as {settings.tensors}" if settings.tensors != "auto" else "",
        f"{settings.distribution} arrivals" if settings.levels[0].rate else "",
        f"inputs {settings.input}" if settings.input != RANDOM else "",
    ]
    return "".join(f", {part}" for part in parts if part)
