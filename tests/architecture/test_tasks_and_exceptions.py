"""Where tasks are born, where any exception is caught, and what is never called."""

from __future__ import annotations

import ast

from tests.architecture.source import PACKAGES, SourceFile, planted, source_files, within_functions

#: Tasks that are not born in a `TaskGroup`: why, and who awaits or cancels them.
FREE_TASKS = {
    "backends/hosts/launcher.py HostConnection.launch": "the launch awaits it; if that is cancelled, its end closes "
    "the socket",
    "backends/hosts/launcher.py HostConnection._connect": "awaited at once; its end closes the socket",
    "protocols/clients/http_shadow.py Copies._begin": "one for each copy in flight; `__aexit__` awaits it",
    "backends/doors/__main__.py OwnHelpers.add": "its end, also by a failure, ends the task of the front door",
    "backends/doors/__main__.py _Process._adopt": "in the group of `wait`",
    "backends/doors/__main__.py _Process._drain": "in the group of `wait`",
    "backends/doors/pool.py DoorPool._start_soon": "starts a door again until it runs; `close` cancels it",
    "kernel/observe/gpu_figures.py GpuFigureReader.refresh": "a driver may take longer than a page waits; "
    "`close` cancels it",
    "backends/supervision/remote_memory.py RemoteMemory._send_soon": "runs while batches wait; `close` cancels it",
    "backends/python/requests.py InferenceRequest.async_exec": "the model gets it, to await it or not",
    "backends/supervision/remote_memory.py RemoteMemory.deliver": "runs while responses wait, whose errors it sends",
    "backends/hosts/agent.py HostAgent.run": "in the task group of the agent's life, which `serve` awaits",
    "backends/hosts/agent.py ServerSession._start_with": "awaited at once, and again before it is undone",
    "backends/hosts/launcher.py AgentLauncher.start": "connects again and again; `close` cancels and awaits it",
    "backends/hosts/ray_launcher.py RayLauncher.start": "starts the broker again; `close` cancels and awaits it",
    "backends/hosts/ray_launcher.py RayLauncher._placed": "as long as the connection to an agent; `close` awaits it",
    "backends/helper/pool.py HelperPool._begin": "one for each helper that works or starts; `close` awaits it",
    "kernel/background.py BackgroundTasks.start": "outlives a cancelled caller; `close` ends and awaits it",
    "kernel/repository/clouds/repository.py _completed": "awaited at once, and again before it is undone",
    "protocols/file_watch.py FileWatch._look_later": "its end plans the next look, also if it has failed",
    "kernel/repository/running_loads.py RunningLoads.run": "awaited at once; `end` cancels them meanwhile",
    "backends/supervision/supervisor.py InstanceSupervisor._lost": "a restart outlives the call; `stop` cancels it",
    "backends/python/event_loop.py EventLoop.start_task.start": "runs a model; `stop` cancels it",
    "protocols/grpc/handlers.py Handlers.begin": "one task a call, for grpclib's handlers; the listener awaits them",
    "protocols/grpc/handlers.py CompressedCall.send_message_nowait": "called without a task; a failure ends the call",
    "protocols/grpc/rpcs/stream.py StreamCall._send": "called without a task; a failure ends the call",
}

#: Functions that catch any exception and do not raise it again: why.
CATCH_ALL = {
    "kernel/traffic/shadow.py _FirstPassage.send": "whatever is wrong with the shadow, the client gets its response",
    "backends/hosts/agent.py ServerSession._start": "the failure of one worker must not end the agent and all others",
    "backends/hosts/ray_broker.py Broker._begin": "Ray raises errors of many kinds: it is tried again, or said",
    "backends/hosts/ray_broker.py Broker._place": "Ray raises errors of many kinds: the launcher gets the text",
    "backends/hosts/ray_broker.py Broker._look": "Ray raises errors of many kinds: the launcher gets the text",
    "backends/doors/__main__.py OwnHelpers._run": "a task that fails must not end its door",
    "backends/doors/door_end.py DoorKernel.submit": "a refusal is a response, whatever it comes from",
    "backends/supervision/remote_memory.py RemoteMemory._deliver_all": "a failed write is the response's error",
    "backends/supervision/watchdog.py Watchdog.look": "one look that fails must not keep the others from it",
    "backends/custom_backend.py SteppedBackend.finalize": "a backend may raise anything: its other steps follow",
    "protocols/openai/texts.py ModelTexts.tokenizer": "the library of tokenizers has no class for its errors",
    "backends/registry.py _import": "a backend's file may raise anything: the load fails with its text",
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
    "backends/worker/loop.py Worker._tried": "a backend may raise anything: the load fails with its text",
    "backends/helper/device_tasks.py _nvml": "a driver has an exception for each of its errors",
    "backends/helper/tasks.py TaskRunner._step": "a task that fails must not end its helper",
    "backends/transport/channel.py LoopChannel._handle": "a worker's message may break anything: the worker is dropped",
    "backends/worker/preloading.py run_chosen": "a model's module may raise anything: its load fails",
    "backends/mlflow/pyfunc.py PyfuncPredictor.__init__": "code of a model's author may raise anything: the load fails",
    "backends/mlflow/pyfunc.py PyfuncPredictor.predict": "as above: the requests fail",
    "backends/mlflow/pytorch.py PytorchPredictor.__init__": "a pickle may raise anything: the load fails",
    "backends/sklearn/estimator.py call": "an estimator may raise anything: its requests fail",
    "backends/sklearn/model_file.py load_estimator": "what reads a file of objects may raise anything: the load fails",
    "backends/worker/process.py run_worker": "the top of a process: its end is logged before it is killed",
    "bench/gpu/check.py forked": "the fork reports what has failed, and ends",
    "bench/gpu/check.py GpuCheck.run": "a driver or a library may raise anything: the other parts go on",
    "bench/server.py ServerProcess.stop": "too slow, or interrupted: the process is killed all the same",
    "kernel/cache/stored.py StoredCache._call": "a store is anybody's code: its failure is a miss",
    "kernel/embedding/server.py ServerThread._run": "the top of a thread: `start` raises it to the program",
    "kernel/config/load.py from_pbtxt": "protobuf raises errors of its own and of Python: the file is wrong",
    "kernel/config/load.py from_json": "protobuf raises errors of its own and of Python: the text is wrong",
    "kernel/background.py BackgroundTasks._again": "what fails is logged and counted, and begins again",
    "kernel/repository/ensembles.py parts_by_name": "what is wrong with one model is found by its load",
    "kernel/file_threads.py _Job.work": "the top of a thread: who waits for it raises it",
    "kernel/repository/lifecycle.py Lifecycle._load_guarded": "one model that fails must not keep others from theirs",
    "kernel/extensions.py extension": "code of a package may raise anything: the load fails with its text",
    "kernel/repository/agents.py ModelAgents._load": "an agent may raise anything: the load fails with it",
    "kernel/repository/agents.py ModelAgents._act": "an agent may raise anything: other actions follow",
    "kernel/loop/iteration_end.py IterationEnd._call": "one callback that fails must not keep the others from running",
    "kernel/observe/logs.py _LineHandler.emit": "as every handler of `logging`: a bad log call must not end its caller",
    "kernel/repository/clouds/process.py Stores.answer": "a client of a store may raise anything: the request fails",
    "kernel/serving/inbox.py Inbox.post": "a scheduler that raises fails its model, not its caller",
    "kernel/serving/model.py Model._scheduler_failed": "a scheduler that cannot start again fails its model",
    "kernel/serving/model.py Model.start": "a scheduler of a package may raise anything: the load fails with its text",
    "kernel/serving/kernel.py Kernel.submit_copy": "as Kernel.submit",
    "kernel/serving/kernel.py Kernel.submit": "a refusal is a response, whatever it comes from",
    "protocols/grpc/handlers.py CompressedCall._compress": "the top of a task: a failure ends the call",
    "protocols/grpc/rpc.py translated_errors": "the connection handler of gRPC: a bug is logged, the call fails",
    "protocols/grpc/rpcs/infer.py InferCall.send": "called by the kernel, which a front door must not hurt",
    "protocols/grpc/rpcs/stream.py StreamCall._send_headers": "the top of a task: a failure ends the call",
    "protocols/grpc/rpcs/stream.py StreamCall._read": "the connection handler of a stream",
    "protocols/grpc/rpcs/stream.py StreamCall._write": "called by the kernel, which a front door must not hurt",
    "protocols/http/inference/infer_call.py HttpInferCall.send": "called by the kernel, which it must not hurt",
    "protocols/intake.py _Decoding.prepared": "called by a task's end, which it must not hurt",
    "protocols/intake.py take": "the connection handler of inference",
    "protocols/http/door.py HttpDoor._respond": "the connection handler of HTTP: a bug is logged, a 500",
}

_TASK_GROUPS = {"asyncio.TaskGroup()", "anyio.create_task_group()"}


def free_tasks(file: SourceFile) -> list[str]:
    """Return the functions that start a task outside a task group that they opened themselves."""
    groups = {
        (function, ast.unparse(item.optional_vars))
        for function, node in within_functions(file)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if item.optional_vars is not None and ast.unparse(item.context_expr) in _TASK_GROUPS
    }
    found = []
    for function, node in within_functions(file):
        if not isinstance(node, ast.Call):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        if name in {"create_task", "ensure_future"} and (function, owner) not in groups:
            found.append(f"{file.path} {function}")
    return found


def catchers(file: SourceFile) -> list[str]:
    """Return the functions that catch any exception and do not raise it again."""
    return [
        f"{file.path} {function}"
        for function, node in within_functions(file)
        if isinstance(node, ast.ExceptHandler) and _catches_all(node)
    ]


def _catches_all(handler: ast.ExceptHandler) -> bool:
    """Whether it catches any exception, and does not end in raising that same exception again."""
    caught = {ast.unparse(node) for node in ast.walk(handler.type)} if handler.type else {"BaseException"}
    last = handler.body[-1]
    raises_it_again = isinstance(last, ast.Raise) and last.exc is None
    return bool(caught & {"Exception", "BaseException"}) and not raises_it_again


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


def test_a_handler_that_cleans_up_and_raises_again_is_not_found() -> None:
    body = "def f():\n    try:\n        g()\n    except {}:\n        h()\n        {}"
    assert catchers(planted(body.format("BaseException", "raise"))) == []
    assert catchers(planted(body.format("ValueError", "return"))) == []
    for caught in ("Exception", "(OSError, Exception)", "BaseException as error"):
        assert catchers(planted(body.format(caught, "return"))) == ["kernel/planted.py f"]
    assert catchers(planted(body.format("Exception as error", "raise E from error"))) == ["kernel/planted.py f"]


def test_no_shell_and_no_evaluation_of_text() -> None:
    for file in source_files():
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "os.system", "os.popen", "pickle.loads"}, file.path
                assert not any(k.arg == "shell" for k in node.keywords), file.path
