"""Requests that schemathesis makes from our OpenAPI document, right ones and wrong ones.

Every answer must be one that the document has: status, content type and schema. Failures of the server's own are none.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from bench.oracle.servers import MODELS
from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

requests = pytest.importorskip("requests")
schemathesis = pytest.importorskip("schemathesis")
openapi_checks = pytest.importorskip("schemathesis.specs.openapi.checks")

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

CHECKS = [
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]
#: Right and wrong requests for each operation.
EXAMPLES = 5
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
FEW = settings(
    derandomize=True, max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    loaded = (f"--load-model={name}" for name in ("sum", "prompt", "rows"))
    with ServerProcess(MODELS, "--model-control-mode=explicit", "--strict-readiness=false", *loaded) as running:
        workers = running.workers()
        yield running
        assert "Traceback" not in running.log, running.log
        # Helpers are started when they are first needed.
        assert {pid: title for pid, title in running.workers().items() if "helper" not in title} == workers


def operations(server: ServerProcess) -> list[Any]:
    document = json.loads(server.get("/v2/openapi.json")[1])
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=f"http://{server.url}")
    return [result.ok() for result in schema.get_all_operations()]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_every_answer_is_one_that_the_document_has(server: ServerProcess, mode: Any) -> None:
    made = operations(server)
    assert len(made) > 30
    with requests.Session() as session:
        for operation in made:

            @FEW
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                response = case.call(session=session)
                case.validate_response(response, checks=CHECKS)
                assert b"internal error (see" not in response.content

            # Nothing is wrong about a request that says nothing.
            with contextlib.suppress(Unsatisfiable):
                ask()
    assert server.get("/v2/health/ready")[0] == 200
    wait_for(lambda: all(each.status == psutil.CONN_LISTEN for each in
                         psutil.Process(server.pid).net_connections(kind="tcp")))  # fmt: skip
