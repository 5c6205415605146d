"""Our server and a real Triton over one folder of models, with the flags that the cases need.

Each serves its own copy of the models, because Python writes compiled files next to a model, which changes the model.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.oracle.ask import AskedServer
from bench.oracle.responses import StepResponse
from bench.server import ServerProcess, free_ports, wait_for
from bench.triton import triton

if TYPE_CHECKING:
    from bench.oracle.steps import Step

ROOT = Path(__file__).parents[2]
#: A suite has cases, the models that they need, and the recorded responses to them.
SUITE = ROOT / "tests/conformance"
CASES = SUITE / "cases"
MODELS = SUITE / "models"
RECORDED = SUITE / "recorded"

#: Models whose names begin with this are loaded by cases, not at the start.
LATER = "late_"
#: Headers that are forwarded to models, and a category of the API that needs a header: no other case uses them.
FLAGS = (
    "--model-control-mode=explicit",
    "--http-header-forward-pattern=x-case-.*",
    "--grpc-header-forward-pattern=x-case-.*",
    "--http-restricted-api=logging:case-key=open",
    "--grpc-restricted-protocol=logging:case-key=open",
)


def flags(models: Path) -> list[str]:
    """Return the flags of both servers."""
    names = sorted(path.name for path in models.iterdir() if path.is_dir())
    return [*FLAGS, *(f"--load-model={name}" for name in names if not name.startswith(LATER))]


class Ours:
    """Our server, which runs while the `with` block lasts. Raises `bench.server.ServerFailed`."""

    def __init__(self, models: Path) -> None:
        self._models = models
        self._running = contextlib.ExitStack()
        self._server: AskedServer
        self.process: ServerProcess
        #: The path of its copy of the models.
        self.repository = ""

    def __enter__(self) -> Ours:
        with contextlib.ExitStack() as started:
            folder = started.enter_context(tempfile.TemporaryDirectory())
            copy = shutil.copytree(self._models, Path(folder, "models"))
            self.process = started.enter_context(ServerProcess(copy, *flags(copy)))
            self._server = started.enter_context(AskedServer(self.process.http_port, self.process.grpc_port))
            self.repository = str(copy)
            self._running = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def ask(self, step: Step) -> StepResponse:
        return self._server.ask(step)


class Triton:
    """A real Triton, which is started again if a request ends it. Raises `bench.triton.NotAvailable`."""

    def __init__(self, models: Path) -> None:
        self._models = models
        self._running = contextlib.ExitStack()
        self._server: AskedServer
        self._pid = 0
        #: The path of its copy of the models.
        self.repository = ""

    def __enter__(self) -> Triton:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def _start(self) -> None:
        folder = self._running.enter_context(tempfile.TemporaryDirectory())
        copy = shutil.copytree(self._models, Path(folder, "models"))
        http_port, grpc_port, metrics_port = free_ports(3)
        self._pid = self._running.enter_context(triton(copy, http_port, grpc_port, metrics_port, *flags(copy)))
        self._server = self._running.enter_context(AskedServer(http_port, grpc_port))
        self.repository = str(copy)

    def ask(self, step: Step) -> StepResponse:
        """Send one step. The status is `crashed` if it ends the server."""
        response = self._server.ask(step)
        if "tatistics" in str(step.args.get("name")) or str(step.args.get("path")).endswith("/stats"):
            response = self._settled(step, response)
        if (response.status == "broken" or response.status == "grpc UNAVAILABLE") and self._has_ended():
            self._running.close()
            self._start()
            return StepResponse("crashed")
        return response

    def _settled(self, step: Step, response: StepResponse) -> StepResponse:
        """Ask again until nothing changes: Triton counts a request some time after it has sent the response."""
        while True:
            time.sleep(0.1)
            again = self._server.ask(step)
            if again == response:
                return response
            response = again

    def _has_ended(self) -> bool:
        try:
            wait_for(lambda: Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", 2)
        except TimeoutError:
            return False
        return True
