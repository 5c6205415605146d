"""A server can be started from any source tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.server import ServerProcess

if TYPE_CHECKING:
    from pathlib import Path

#: Logs its folders, and the ports as a server does, and waits for its end.
KERNEL = """import os
import signal

import backends

print("from", os.getcwd(), os.path.dirname(backends.__file__))
for number, service in enumerate(("HTTPService", "GRPCInferenceService", "Metrics Service"), 1):
    print("Started", service, f"at 127.0.0.1:{number}", flush=True)
signal.pause()
"""


def test_a_server_runs_from_its_own_tree(tmp_path: Path) -> None:
    for package, source in (("kernel", KERNEL), ("backends", "")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "__main__.py").write_text(source)
    with ServerProcess(None, tree=tmp_path) as server:
        server.wait_for_log(f"from {tmp_path} {tmp_path / 'backends'}\n")
        assert (server.http_port, server.grpc_port, server.metrics_port) == (1, 2, 3)
