"""The light client of all rows: it checks a server's response, warms the model up, and runs the load of a row.

It owns the tensors in shared memory of the rows that have some, which it registers with a server before each load.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.light import LightLoad, LightRequest, run_load
from bench.light_cases import SHARED, LightCase, build_case, compared, region_names, wrong_outputs
from bench.light_check import BadAnswer, CheckClient

if TYPE_CHECKING:
    from types import TracebackType

    from bench.light_rows import LightRow
    from bench.rows import Figures

_SHARED_MEMORY = Path("/dev/shm")


class LightClient:
    """Runs rows with wrk and h2load. Leave the `with` block to remove its shared memory."""

    def __init__(self, seconds: int = 1) -> None:
        """`seconds` is the length of each load; wrk knows whole seconds only."""
        self.seconds = seconds
        self.files: dict[str, Path] = {}

    def __enter__(self) -> LightClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in self.files.values():
            path.unlink(missing_ok=True)
        self.files.clear()

    def prepare(self, row: LightRow, model: str, ports: dict[str, int]) -> LightLoad | str:
        """Check one response of a server and warm the model up. Returns the load, or what is wrong with the server.

        `ports` are those of the server by protocol; TLS is spoken on them if the row has it.
        """
        case = build_case(row.payload, model)
        port = ports[row.protocol]
        try:
            with CheckClient(row.protocol, port, tls=row.tls) as client:
                if row.payload.form == SHARED:
                    self._register(case, client)
                response = client.exchange(case.request)
                wrong = (
                    compared(case, {"OUTPUT0": self._file(region_names(row.payload)[1]).read_bytes()})
                    if row.payload.form == SHARED
                    else wrong_outputs(case, response.headers, response.body)
                )
                if wrong:
                    return wrong
                client.warm_up(case.request)
        except (BadAnswer, OSError) as error:
            return str(error)
        return LightLoad(
            row.protocol, port, case.request, row.connections, row.streams, self.seconds * row.longer, row.tls,
            row.keep_alive, len(response.body),
        )  # fmt: skip

    def measure(self, load: LightLoad) -> Figures | str:
        """Run a load that `prepare` has returned. Returns its figures, or the reason why there are none."""
        return run_load(load)

    def _register(self, case: LightCase, client: CheckClient) -> None:
        """Fill the input's region, empty the output's, and register both. Raises `BadAnswer`, `OSError`."""
        [tensor] = case.inputs.values()
        for name, content in zip(region_names(case.payload), (tensor.tobytes(), bytes(tensor.nbytes)), strict=True):
            path = self._file(name)
            with path.open("r+b" if path.exists() else "wb") as file:  # a server may have mapped the file already
                file.write(content)
            base = f"/v2/systemsharedmemory/region/{name}"
            with contextlib.suppress(BadAnswer):  # it is not registered yet
                client.exchange(LightRequest(f"{base}/unregister", b""))
            settings = {"key": f"/{path.name}", "offset": 0, "byte_size": tensor.nbytes}
            client.exchange(LightRequest(f"{base}/register", msgspec.json.encode(settings)))

    def _file(self, region: str) -> Path:
        return self.files.setdefault(region, _SHARED_MEMORY / f"{region}_{os.getpid()}")
