"""`naiad build-engine` with the fake builder, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from backends.tensorrt.building.command import config_text, run_command
from backends.tensorrt.building.engine import BarDisplay, NoDisplay, progress_monitor
from backends.tensorrt.building.settings import BuildSettings, builder_flags, byte_size, parse_shapes, profiles
from backends.tensorrt.library import MODULE_VARIABLE
from backends.tensorrt.signature import EngineSignature, EngineTensor, Extent
from kernel.config.load import from_pbtxt
from kernel.errors import InvalidArgument, ServingError, Unsupported
from shm.cuda import BINDINGS_VARIABLE, cuda
from tests import fake_tensorrt
from tests.backends.tensorrt.plans import add_sub_plan, tensor
from tests.fake_tensorrt.plan import PlanFile, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHAPES = ["--min-shapes", "A:1x4,B:1x4", "--max-shapes", "A:8x4,B:8x4"]


@pytest.fixture
def onnx_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model of the fake's, and the fake devices."""
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    monkeypatch.setenv(MODULE_VARIABLE, "tests.fake_tensorrt")
    monkeypatch.chdir(tmp_path)
    cuda.cache_clear()
    path = tmp_path / "add_sub.onnx"
    path.write_bytes(encode(add_sub_plan()))
    yield path
    cuda.cache_clear()


def test_a_model_folder_is_written_with_plan_and_configuration(
    onnx_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([str(onnx_file), *SHAPES]) == 0
    folder = onnx_file.parent / "add_sub"
    plan = decode((folder / "1" / "model.plan").read_bytes())
    assert plan is not None
    assert plan.profiles == [{"A": [[1, 4], [8, 4], [8, 4]], "B": [[1, 4], [8, 4], [8, 4]]}]
    config = from_pbtxt((folder / "config.pbtxt").read_bytes(), "config.pbtxt")
    assert (config.backend, config.max_batch_size, list(config.input[0].dims)) == ("tensorrt", 8, [4])
    assert "built in" in capsys.readouterr().out


def test_a_configuration_that_is_there_is_not_overwritten(onnx_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = onnx_file.parent / "m" / "config.pbtxt"
    config.parent.mkdir()
    config.write_text("mine")
    assert run_command([str(onnx_file), *SHAPES, "-o", "m"]) == 0
    assert config.read_text() == "mine"
    assert "is there already and stays as it is" in capsys.readouterr().out


def test_a_plan_outside_a_repository_has_its_configuration_printed(
    onnx_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([str(onnx_file), *SHAPES, "-o", "some.plan"]) == 0
    out = capsys.readouterr().out
    assert 'default_model_filename: "some.plan"' in out
    assert 'name: "add_sub"' in out


def test_options_reach_the_builder(onnx_file: Path) -> None:
    options = ["--version-compatible", "--hardware-compatibility=ampere+", "--workspace=2G", "--timing-cache=times"]
    assert run_command([str(onnx_file), *SHAPES, *options]) == 0
    plan = decode((onnx_file.parent / "add_sub" / "1" / "model.plan").read_bytes())
    assert plan is not None
    assert plan.version_compatible
    assert plan.any_device
    assert plan.settings == {"pools": {"WORKSPACE": 2 << 30}}
    cache = onnx_file.parent / "times"
    assert cache.read_bytes() == b"+"
    assert run_command([str(onnx_file), *SHAPES, *options]) == 0
    assert cache.read_bytes() == b"++"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "error: input 'A' has variable dimensions, [-1,4]: say for which shapes to build, for example "
             "--min-shapes A:1x4 --opt-shapes A:8x4 --max-shapes A:8x4"),
        (["--fp16", *SHAPES], "so --fp16 has no meaning: convert the model before"),
        (["--fp16", "--strongly-typed", *SHAPES], "--fp16 lets TensorRT choose datatypes, and --strongly-"),
        (["--workspace=many"], "error: 'many' is not a size"),
        (["--hardware-compatibility=all"], "is not a level of hardware compatibility; choose one of none, ampere+"),
        (["--compute-capability=8.6", *SHAPES], "--compute-capability is for TensorRT for RTX only"),
        (["--no-such-option"], "No such option: --no-such-option"),
    ],
)  # fmt: skip
def test_mistakes_are_said(
    onnx_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run_command([str(onnx_file), *arguments]) == 1
    assert said in capsys.readouterr().err
    assert not (onnx_file.parent / "add_sub").exists()


def test_the_errors_of_the_parser_are_listed(onnx_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx_file.write_bytes(b"a model of another world")
    assert run_command([str(onnx_file)]) == 1
    assert capsys.readouterr().err == (
        f"error: TensorRT cannot use '{onnx_file}':\n"
        "  node 'teleport_1' (Teleport): No importer registered for op: Teleport.\n"
    )


def test_a_failed_build_says_tensorrt_s_reason(onnx_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx_file.write_bytes(
        encode(PlanFile([tensor("A", [4]), tensor("X", [4], output=True)], {"X": ["impossible", "A"]}))
    )
    assert run_command([str(onnx_file)]) == 1
    assert "error: the engine cannot be built: Error Code 10: Could not find any impl" in capsys.readouterr().err


def test_without_a_gpu_or_a_file_nothing_is_built(
    onnx_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command(["missing.onnx"]) == 1
    assert "error: there is no file 'missing.onnx'" in capsys.readouterr().err
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "0")
    assert run_command([str(onnx_file), *SHAPES]) == 1
    assert "no GPU can be used: no GPU is visible" in capsys.readouterr().err


# ---- decisions ------------------------------------------------------------------------------


def inputs(*dims: int, **more: Any) -> list[EngineTensor]:
    return [EngineTensor("a:b", True, "FLOAT", dims, **more)]


def test_shapes_of_names_with_colons_are_read() -> None:
    assert parse_shapes("a:b:1x3,c:7") == {"a:b": (1, 3), "c": (7,)}
    for wrong in ("1x3", "a:", "a:1xb", "a:1,a:2"):
        with pytest.raises(InvalidArgument):
            parse_shapes(wrong)


def settings(**given: tuple[str, ...] | bool) -> BuildSettings:
    from pathlib import Path

    return BuildSettings(Path("m.onnx"), Path("m.plan"), **given)  # type: ignore[arg-type]


def test_each_repetition_of_the_shapes_is_a_profile() -> None:
    given = settings(opt_shapes=("a:b:1x4", "a:b:8x4"), max_shapes=("a:b:2x4", "a:b:16x4"))
    first, second = profiles(given, inputs(-1, 4))
    assert first.dims == {"a:b": Extent((1, 4), (1, 4), (2, 4))}
    assert second.dims == {"a:b": Extent((8, 4), (8, 4), (16, 4))}
    uneven = settings(opt_shapes=("a:b:1x4", "a:b:8x4"), max_shapes=("a:b:2x4",))
    with pytest.raises(InvalidArgument, match="give all of them 2 times"):
        profiles(uneven, inputs(-1, 4))


@pytest.mark.parametrize(
    ("shape", "said"),
    [("a:b:1x5", "does not fit input"), ("c:1x4", "the model has no input 'c', its inputs are: a:b"),
     ("a:b:9x4", "must grow")],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(shape: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        profiles(settings(min_shapes=(shape,), opt_shapes=("a:b:4x4",)), inputs(-1, 4))


def test_a_shape_tensor_needs_its_values() -> None:
    with pytest.raises(InvalidArgument, match="is a shape tensor: say which values it has"):
        profiles(settings(), inputs(2, is_shape_tensor=True))
    (found,) = profiles(settings(opt_shapes=("a:b:3x4",)), inputs(2, is_shape_tensor=True))
    assert found.values == {"a:b": Extent((3, 4), (3, 4), (3, 4))}


def test_sizes_have_units() -> None:
    assert [byte_size(text) for text in ("0", "12", "4k", "512MiB", "4GB")] == [0, 12, 4096, 512 << 20, 4 << 30]


def test_flags_of_tensorrt_10_are_used_where_they_are() -> None:
    assert builder_flags(settings(fp16=True, version_compatible=True), {"FP16"}, "10.13") == [
        "FP16",
        "VERSION_COMPATIBLE",
    ]
    with pytest.raises(Unsupported, match="TensorRT 11.4 takes the datatypes of the ONNX model as they are"):
        builder_flags(settings(bf16=True), {"VERSION_COMPATIBLE"}, "11.4")


def test_a_configuration_names_the_profiles_of_its_engine() -> None:
    given = settings(opt_shapes=("a:b:1x4", "a:b:8x4"))
    tensors = inputs(-1, 4)
    engine = EngineSignature(
        {"a:b": tensors[0], "X": EngineTensor("X", False, "HALF", (-1,))}, tuple(profiles(given, tensors))
    )
    config = from_pbtxt(config_text("m", engine, "model.plan").encode(), "config.pbtxt")
    assert list(config.instance_group[0].profile) == ["0", "1"]
    assert (list(config.output[0].dims), list(config.output[0].reshape.shape)) == ([1], [])
    assert config.HasField("dynamic_batching")


# ---- progress -------------------------------------------------------------------------------


class Bars:
    """Records what a progress of rich would draw."""

    def __init__(self) -> None:
        self.shown: dict[int, list[object]] = {}

    def add_task(self, description: str, total: int) -> int:
        self.shown[len(self.shown)] = [description, 0, total]
        return len(self.shown) - 1

    def update(self, task: int, completed: int) -> None:
        self.shown[task][1] = completed

    def remove_task(self, task: int) -> None:
        self.shown[task].append("removed")


def test_phases_of_a_build_are_bars_within_one_another() -> None:
    bars = Bars()
    monitor = progress_monitor(fake_tensorrt, BarDisplay(bars), lambda: False)
    monitor.phase_start("Building", None, 2)
    monitor.phase_start("Tactics", "Building", 5)
    assert monitor.step_complete("Tactics", 2)
    monitor.phase_finish("Tactics")
    monitor.step_complete("Unknown", 0)
    assert list(bars.shown.values()) == [["Building", 0, 2], ["  Tactics", 3, 5, "removed"]]


def test_a_build_that_is_ended_stops_at_its_next_step() -> None:
    monitor = progress_monitor(fake_tensorrt, NoDisplay(), lambda: True)
    monitor.phase_start("Building", None, 2)
    assert not monitor.step_complete("Building", 0)


def test_a_build_can_be_ended(onnx_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.tensorrt.building.command._Cancellation.__call__", lambda self: True)
    assert run_command([str(onnx_file), *SHAPES]) == 130
    assert not (onnx_file.parent / "add_sub").exists()


def test_wrong_settings_are_errors_for_people() -> None:
    with pytest.raises(ServingError):
        byte_size("-1")
