"""Clients of a drill: each sends one request after another over one connection, and checks every response."""

from __future__ import annotations

import http.client
import json
import select
import threading
import time
from collections import Counter
from typing import Any

MODEL = "m"

CONFIG = """
name: "m" backend: "python" instance_group [{ count: 2 kind: KIND_CPU }]
input [{ name: "IN" data_type: TYPE_INT32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [-1] }]
"""

#: Adds 1, in 5 ms: a request is in the model when a fault comes.
SOURCE = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.005)
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(each, "IN").as_numpy() + 1)
            ])
            for each in requests
        ]
"""

#: How long a response may take, in seconds. One that takes longer counts as lost.
LIMIT_S = 60.0


class Load:
    """Clients, from the beginning of the `with` block to its end."""

    def __init__(self, port: int, clients: int) -> None:
        self.port = port
        self.requests = self.wrong = self.lost = self.doubled = 0
        #: The texts of errors, and how often each came.
        self.errors: Counter[str] = Counter()
        self.longest_s = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, client: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        connection.connect()
        count = 0
        while not self._over.is_set():
            count += 1
            begin_s = time.monotonic()
            try:
                found = self._exchange(connection, [client, count])
            except OSError:
                found = None
                connection.close()
                connection.connect()
            self._note(found, [client + 1, count + 1], time.monotonic() - begin_s)
        connection.close()

    def _exchange(self, connection: http.client.HTTPConnection, values: list[int]) -> Any:
        tensor = {"name": "IN", "datatype": "INT32", "shape": [len(values)], "data": values}
        if select.select([connection.sock], [], [], 0)[0]:  # nothing was asked for
            with self._lock:
                self.doubled += 1
        connection.request("POST", f"/v2/models/{MODEL}/infer", json.dumps({"inputs": [tensor]}))
        return json.loads(connection.getresponse().read())

    def _note(self, found: Any, expected: list[int], took_s: float) -> None:
        with self._lock:
            self.requests += 1
            self.longest_s = max(self.longest_s, took_s)
            if found is None:
                self.lost += 1
            elif "error" in found:
                self.errors[found["error"]] += 1
            elif found["outputs"][0]["data"] != expected:
                self.wrong += 1
