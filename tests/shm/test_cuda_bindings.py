"""What we call of CUDA has the names, parameters and results of cuda-bindings, 12 and 13. No GPU is needed.

Skipped where cuda-bindings is not installed. `make gpu-names` installs it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import shm.cuda
from shm.cuda import GONE_ERRORS, HANDLE_BYTE_SIZE, PASSING_ERRORS, STICKY_ERRORS
from tests.fake_cuda import runtime as fake

runtime: Any = pytest.importorskip("cuda.bindings.runtime")

_TREE = ast.parse(Path(shm.cuda.__file__).read_text())

#: How many values follow the error code.
RESULTS = {
    "cudaMemGetInfo": 2, "cudaDeviceGetStreamPriorityRange": 2, "cudaGetDeviceCount": 1, "cudaGetDevice": 1,
    "cudaMalloc": 1, "cudaHostAlloc": 1, "cudaStreamCreateWithFlags": 1, "cudaStreamCreateWithPriority": 1,
    "cudaEventCreateWithFlags": 1, "cudaIpcOpenMemHandle": 1, "cudaIpcGetMemHandle": 1, "cudaGetDeviceProperties": 1,
    "cudaStreamEndCapture": 1, "cudaGraphInstantiate": 1, "cudaEventElapsedTime": 1,
}  # fmt: skip


def calls() -> dict[str, int]:
    """Return the functions of the runtime that `shm/cuda.py` calls, and with how many arguments."""
    found: dict[str, int] = {}
    for node in ast.walk(_TREE):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "_call" and isinstance(node.args[0], ast.Constant):
            found[str(node.args[0].value)] = len(node.args) - 1
        elif ast.unparse(node.func.value) in ("runtime", "self._runtime"):
            found[node.func.attr] = len(node.args)
    return found


def attributes() -> set[str]:
    """Return what `shm/cuda.py` reads of the runtime, such as `cudaMemcpyKind.cudaMemcpyDefault`."""
    texts = {ast.unparse(node) for node in ast.walk(_TREE) if isinstance(node, ast.Attribute)}
    return {text.split("runtime.", 1)[1] for text in texts if text.startswith(("runtime.cuda", "self._runtime.cuda"))}


def names_of(module: Any, text: str) -> Any:
    for name in text.split("."):
        module = getattr(module, name)
    return module


def test_all_calls_are_found() -> None:
    found = calls()
    assert len(found) > 25
    assert found["cudaMemcpyAsync"] == 5
    assert {"cudaMemcpyKind.cudaMemcpyDefault", "cudaHostRegisterPortable"} <= attributes()


@pytest.mark.parametrize("name", sorted(calls()))
def test_a_function_takes_what_it_is_given(name: str) -> None:
    parameters = [None] * calls()[name]
    if inspect.isclass(getattr(runtime, name)):  # a handle: its address is optional
        getattr(runtime, name)(*(0 for _ in parameters))
    else:
        inspect.signature(getattr(runtime, name)).bind(*parameters)


@pytest.mark.parametrize("name", sorted(attributes()))
def test_a_name_is_there_and_the_fake_has_the_same_value(name: str) -> None:
    found = names_of(runtime, name)
    if isinstance(found, int):
        assert int(found) == int(names_of(fake, name))


def test_results_have_the_error_first_and_then_as_many_values_as_we_take() -> None:
    stream = runtime.cudaStream_t(1)
    event, graph, execution = runtime.cudaEvent_t(0), runtime.cudaGraph_t(0), runtime.cudaGraphExec_t(0)
    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    count = runtime.cudaGetDeviceCount()[1]
    if count:
        pytest.skip("the calls below are without sense, and only safe where there is no GPU")
    given = {
        "cudaMemGetInfo": (), "cudaDeviceGetStreamPriorityRange": (), "cudaGetDeviceCount": (), "cudaMalloc": (64,),
        "cudaHostAlloc": (64, runtime.cudaHostAllocPortable), "cudaStreamCreateWithFlags": (1,),
        "cudaStreamCreateWithPriority": (1, 0), "cudaEventCreateWithFlags": (3,),
        "cudaIpcOpenMemHandle": (runtime.cudaIpcMemHandle_t(), runtime.cudaIpcMemLazyEnablePeerAccess),
        "cudaIpcGetMemHandle": (4096,), "cudaGetDeviceProperties": (0,), "cudaStreamEndCapture": (stream,),
        "cudaGraphInstantiate": (graph, 0), "cudaSetDevice": (0,), "cudaGetDevice": (),
        "cudaFree": (4096,), "cudaFreeHost": (4096,),
        "cudaIpcCloseMemHandle": (4096,), "cudaHostUnregister": (4096,),
        "cudaHostRegister": (4096, 4096, runtime.cudaHostRegisterPortable), "cudaDeviceSynchronize": (),
        "cudaMemcpyAsync": (4096, 8192, 16, runtime.cudaMemcpyKind.cudaMemcpyDefault, stream),
        "cudaMemsetAsync": (4096, 0, 16, stream), "cudaStreamSynchronize": (stream,),
        "cudaEventRecord": (event, stream), "cudaEventElapsedTime": (event, event), "cudaEventDestroy": (event,),
        "cudaStreamDestroy": (stream,),
        "cudaEventSynchronize": (event,), "cudaEventQuery": (event,), "cudaStreamWaitEvent": (stream, event, 0),
        "cudaGetLastError": (),
        "cudaStreamBeginCapture": (stream, mode), "cudaGraphDestroy": (graph,), "cudaGraphLaunch": (execution, stream),
        "cudaGraphExecDestroy": (execution,),
    }  # fmt: skip
    assert set(calls()) - set(given) == {"cudaIpcMemHandle_t", "cudaStream_t"}
    for name, arguments in given.items():
        assert len(arguments) == calls()[name], name
        result = getattr(runtime, name)(*arguments)
        assert isinstance(result, tuple), name
        assert isinstance(result[0], runtime.cudaError_t), name
        assert len(result) == 1 + RESULTS.get(name, 0), name
        assert getattr(result[0], "name", "").startswith("cuda"), name


def test_handles_streams_and_properties_have_what_we_read() -> None:
    handle = runtime.cudaIpcMemHandle_t()
    assert int(handle.getPtr()) > 0
    assert HANDLE_BYTE_SIZE == runtime.CUDA_IPC_HANDLE_SIZE
    assert int(runtime.cudaStream_t(0x1234)) == 0x1234
    properties = runtime.cudaDeviceProp()
    assert isinstance(properties.name, bytes)
    assert len(bytes(properties.uuid.bytes)) == 16
    assert (int(properties.major), int(properties.minor), int(properties.totalGlobalMem)) == (0, 0, 0)


def test_errors_have_the_numbers_that_we_know() -> None:
    found = {int(error): error for error in runtime.cudaError_t}
    for error in fake.cudaError_t:
        assert found[int(error)].name == error.name
    ends = "the process must be terminated and relaunched"
    sticky = {code for code, error in found.items() if ends in " ".join((error.__doc__ or "").split())}
    # The text is not in those of hardware errors, nor in the unknown one's. Bindings of 13.0 and 13.1 have no texts.
    assert not sticky or sticky | {214, 220, 999} == STICKY_ERRORS & set(found)
    assert set(found) >= STICKY_ERRORS
    names = {code: found[code].name for code in (*GONE_ERRORS, *PASSING_ERRORS)}
    assert names == {
        3: "cudaErrorInitializationError",
        46: "cudaErrorDevicesUnavailable",
        709: "cudaErrorContextIsDestroyed",
        802: "cudaErrorSystemNotReady",
        805: "cudaErrorMpsConnectionFailed",
        806: "cudaErrorMpsRpcFailure",
        807: "cudaErrorMpsServerNotReady",
    }


def test_the_driver_has_the_functions_that_are_called() -> None:
    driver: Any = importlib.import_module("cuda.bindings.driver")
    for name, arguments in (
        ("cuMemGetAddressRange", (4096,)),
        ("cuDeviceGet", (0,)),
        ("cuDevicePrimaryCtxGetState", (0,)),
    ):
        inspect.signature(getattr(driver, name)).bind(*arguments)
    assert int(driver.CUresult.CUDA_SUCCESS) == 0


def test_nvml_has_what_the_figures_are_read_with() -> None:
    nvml: Any = pytest.importorskip("pynvml")
    from backends.helper import device_tasks

    text = Path(device_tasks.__file__).read_text()
    used = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    names = {name for name in used if name.startswith(("nvml", "NVML"))}
    assert len(names) >= 7
    assert {name for name in names if not hasattr(nvml, name)} == set()
    assert nvml.nvmlMemory_v2 == device_tasks.MEMORY_V2
    assert "version" in inspect.signature(nvml.nvmlDeviceGetMemoryInfo).parameters
