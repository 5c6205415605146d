"""Where tasks are born, where any exception is caught, and what is never called."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.architecture.source import PACKAGES, SourceFile, planted, source_files, within_functions

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Tasks that are not born in a `TaskGroup`: why, and who awaits or cancels them.
FREE_TASKS = {
    "backends/hosts/launcher.py HostConnection.launch": "the launch awaits it; if that is cancelled, its end closes "
    "the socket",
    "backends/hosts/launcher.py HostConnection._connect": "awaited at once; its end closes the socket",
    "kernel/observe/gpu_figures.py GpuFigureReader.refresh": "a driver may take longer than a page waits; "
    "`close` cancels it",
    "backends/python/requests.py InferenceRequest.async_exec": "the model gets it, to await it or not",
    "backends/hosts/agent.py ServerSession._start_with": "awaited at once, and again before it is undone",
    "kernel/background.py BackgroundTasks.start": "outlives a cancelled caller; `close` ends and awaits it",
    "kernel/repository/clouds/repository.py _completed": "awaited at once, and again before it is undone",
    "protocols/file_watch.py FileWatch._look_later": "its end plans the next look, also if it has failed",
    "kernel/repository/running_loads.py RunningLoads.run": "awaited at once; `end` cancels them meanwhile",
    "backends/python/event_loop.py EventLoop.start_task.start": "runs a model; `stop` cancels it",
    "protocols/grpc/handlers.py Handlers.begin": "one task a call, for grpclib's handlers; the listener awaits them",
    "protocols/grpc/handlers.py CompressedCall.send_message_nowait": "called without a task; its end sends the "
    "message, or fails the call",
}

#: Functions that catch any exception, or suppress it, and do not raise it again: why. Elsewhere code of others, which
#: may raise anything, runs in a block of `kernel.errors.failing_as` or `failure_logged`.
CATCH_ALL = {
    "kernel/traffic/shadow.py _FirstPassage.send": "whatever is wrong with the shadow, the client gets its response",
    "backends/doors/door_end.py DoorKernel.submit": "a refusal is a response, whatever it comes from",
    "backends/python/backend.py PythonBackend._call": "a model's code may raise anything: its requests fail",
    "backends/python/backend.py PythonBackend._await_decoupled": "a model's code may raise anything: its requests fail",
    "backends/python/backend.py PythonBackend._overlap": "a model's code may raise anything: its requests fail",
    "backends/python/backend.py _await": "a model's code may raise anything: it is not ready",
    "backends/python/backend.py check_health": "a model's code may raise anything: it is not ready",
    "backends/python/event_loop.py Paced.__await__": "what is thrown into the coroutine around a model's goes on to it",
    "backends/python/failures.py model_code": "a model's code may raise anything: its requests fail",
    "backends/streaming.py StreamingBackend._send": "runs in a thread of its own, whose request must be answered",
    "backends/python/model_modules.py ModelModules._is_own": "libraries put objects that raise into sys.modules",
    "backends/worker/members.py Members._run": "the top of a thread: what ended it is logged and sent",
    "backends/worker/loop.py Worker._run_backend": "a backend may raise anything: its requests fail, the worker stays",
    "backends/worker/pipelined_batches.py PipelinedBatches._prepared": "as `Worker._run_backend`",
    "backends/worker/pipelined_batches.py PipelinedBatches._tried": "as `Worker._run_backend`",
    "backends/hosts/ray_broker.py _quietly": "Ray raises errors of many kinds: what is ended may have ended",
    "backends/python/former_names.py add_former_names": "an installed vLLM may raise anything: its import says why",
    "backends/zygote/preloader.py Preloader.import_backend": "a library may raise anything: the worker's load says",
    "backends/transport/channel.py LoopChannel._handle": "a worker's message may break anything: the worker is dropped",
    "backends/worker/process.py run_worker": "the top of a process: its end is logged before it is killed",
    "bench/gpu/check.py GpuCheck.run": "a driver or a library may raise anything: the other parts go on",
    "kernel/cache/stored.py StoredCache._call": "a store is anybody's code: its failure is a miss",
    "kernel/embedding/server.py ServerThread._run": "the top of a thread: `start` raises it to the program",
    "kernel/background.py BackgroundTasks._again": "what fails is logged and counted, and begins again",
    "kernel/file_threads.py _Job.work": "the top of a thread: who waits for it raises it",
    "kernel/loop/iteration_end.py IterationEnd._call": "one callback that fails must not keep the others from running",
    "kernel/observe/logs.py _LineHandler.emit": "as every handler of `logging`: a bad log call must not end its caller",
    "kernel/serving/inbox.py Inbox.post": "a scheduler that raises fails its model, not its caller",
    "kernel/serving/kernel.py Kernel.submit": "a refusal is a response, whatever it comes from",
    "protocols/grpc/rpc.py translated_errors": "the connection handler of gRPC: a bug is logged, the call fails",
    "protocols/grpc/rpcs/infer.py InferCall.send": "called by the kernel, which a front door must not hurt",
    "protocols/grpc/rpcs/stream.py StreamCall._read": "the connection handler of a stream",
    "protocols/grpc/rpcs/stream.py StreamCall._write": "called by the kernel, which a front door must not hurt",
    "protocols/http/inference/infer_call.py HttpInferCall.send": "called by the kernel, which it must not hurt",
    "protocols/intake.py take": "the connection handler of inference",
    "protocols/http/door.py HttpDoor._respond": "the connection handler of HTTP: a bug is logged, a 500",
}

_TASK_GROUPS = {"asyncio.TaskGroup()", "anyio.create_task_group()"}


def free_tasks(file: SourceFile) -> list[str]:
    """Return the functions that start a task outside a task group that they, or their class, have opened themselves."""
    groups = {
        (owner_of_group(function, name), name)
        for function, node in within_functions(file)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if item.optional_vars is not None and ast.unparse(item.context_expr) in _TASK_GROUPS
        for name in [ast.unparse(item.optional_vars)]
    }
    found = []
    for function, node in within_functions(file):
        if not isinstance(node, ast.Call):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        if name in {"create_task", "ensure_future"} and (owner_of_group(function, owner), owner) not in groups:
            found.append(f"{file.path} {function}")
    return found


def owner_of_group(function: str, name: str) -> str:
    """Return who has the task group called `name` in `function`: its class for an attribute, else itself."""
    return function.rpartition(".")[0] if name.startswith("self.") else function


def catchers(file: SourceFile) -> list[str]:
    """Return the functions that catch any exception and do not raise it again."""
    return [
        f"{file.path} {function}"
        for function, node in within_functions(file)
        if (isinstance(node, ast.ExceptHandler) and _catches_all(node))
        or (isinstance(node, ast.Call) and _suppresses_all(node))
    ]


def _catches_all(handler: ast.ExceptHandler) -> bool:
    """Whether it catches any exception, and does not end in raising that same exception again."""
    last = handler.body[-1]
    raises_it_again = isinstance(last, ast.Raise) and last.exc is None
    return (handler.type is None or _names_all([handler.type])) and not raises_it_again


def _suppresses_all(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "contextlib.suppress" and _names_all(call.args)


def _names_all(classes: Sequence[ast.expr]) -> bool:
    return any(ast.unparse(node) in {"Exception", "BaseException"} for each in classes for node in ast.walk(each))


def test_tasks_are_born_in_a_task_group() -> None:
    found = {place for file in source_files() for place in free_tasks(file)}
    assert sorted(found - FREE_TASKS.keys()) == [], "a task that nobody awaits loses its exception"
    assert sorted(FREE_TASKS.keys() - found) == [], "these start no task any more"


def test_any_exception_is_caught_only_at_named_places() -> None:
    found = {place for file in source_files(*PACKAGES, "bench") for place in catchers(file)}
    assert sorted(found - CATCH_ALL.keys()) == [], "catch what can happen, by its name"
    assert sorted(CATCH_ALL.keys() - found) == [], "these catch no more than they name any more"


def test_only_tasks_outside_a_group_are_found() -> None:
    grouped = "async def f():\n    async with asyncio.TaskGroup() as tasks:\n        tasks.create_task(g())"
    assert free_tasks(planted(grouped)) == []
    assert free_tasks(planted("class C:\n    def f(self):\n        loop.create_task(g())")) == ["kernel/planted.py C.f"]
    assert free_tasks(planted("async def f(tasks):\n    tasks.create_task(g())")) == ["kernel/planted.py f"]
    of_class = (
        "class C:\n    async def f(self):\n        async with asyncio.TaskGroup() as self.tasks:\n            pass\n"
        "    def g(self):\n        self.tasks.create_task(h())\n"
    )
    assert free_tasks(planted(of_class)) == []
    assert free_tasks(planted(f"{of_class}class D:\n    def g(self):\n        self.tasks.create_task(h())")) == [
        "kernel/planted.py D.g"
    ]


def test_a_handler_that_cleans_up_and_raises_again_is_not_found() -> None:
    body = "def f():\n    try:\n        g()\n    except {}:\n        h()\n        {}"
    assert catchers(planted(body.format("BaseException", "raise"))) == []
    assert catchers(planted(body.format("ValueError", "return"))) == []
    for caught in ("Exception", "(OSError, Exception)", "BaseException as error"):
        assert catchers(planted(body.format(caught, "return"))) == ["kernel/planted.py f"]
    assert catchers(planted(body.format("Exception as error", "raise E from error"))) == ["kernel/planted.py f"]


def test_a_block_that_suppresses_any_exception_is_found() -> None:
    body = "def f():\n    with contextlib.suppress({}):\n        g()"
    assert catchers(planted(body.format("ValueError"))) == []
    assert catchers(planted(body.format("OSError, Exception"))) == ["kernel/planted.py f"]


def test_no_shell_and_no_evaluation_of_text() -> None:
    for file in source_files():
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "os.system", "os.popen", "pickle.loads"}, file.path
                assert not any(k.arg == "shell" for k in node.keywords), file.path
