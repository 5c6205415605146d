"""A zygote in which the import of the backend `identity` leaves a thread, as that of ONNX Runtime with telemetry."""

from __future__ import annotations

import runpy
import threading

from backends import registry

if __name__ == "__main__":
    registry.BUILT_IN["identity"] = "tests.backends.zygote.strange_zygote:nothing"
    runpy.run_module("backends.zygote", run_name="__main__")
else:
    threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()
