"""Finds and loads the file of a model. A pickle is opened only if the operator of the server has allowed it.

Which types a skops file may have, beside those that skops trusts itself. Pure.

skops makes objects of a type only if the type is trusted: so a file can only combine what is in this list. The list is
the server's own, whatever a file or a folder says. None of these runs code that it finds in a file.
"""

from __future__ import annotations

import warnings
import zipfile
from typing import TYPE_CHECKING, Any

from backends.sklearn.library import required
from kernel.errors import InternalError, InvalidArgument, ServingError, Unavailable, Unsupported, failing_as
from kernel.machine import available_memory_byte_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from backends.base import ModelArguments

#: The setting with more types: --backend-config=sklearn,trusted-types=TYPE,TYPE
TRUSTED_TYPES = "trusted-types"

_TRUSTED = frozenset(
    {
        "collections.OrderedDict",
        "lightgbm.basic.Booster",
        "lightgbm.sklearn.LGBMClassifier",
        "lightgbm.sklearn.LGBMRanker",
        "lightgbm.sklearn.LGBMRegressor",
        "numpy.dtype",
        "sklearn._loss.link.Interval",
        "sklearn._loss.link.LogitLink",
        "sklearn._loss.link.MultinomialLogit",
        "sklearn._loss.loss.HalfBinomialLoss",
        "sklearn._loss.loss.HalfMultinomialLoss",
        "sklearn._loss.loss.HalfSquaredError",
        "sklearn.calibration._CalibratedClassifier",
        "sklearn.calibration._SigmoidCalibration",
        "sklearn.compose._column_transformer._RemainderColsList",
        "sklearn.ensemble._hist_gradient_boosting.binning._BinMapper",
        "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
        "sklearn.gaussian_process.kernels.CompoundKernel",
        "sklearn.gaussian_process.kernels.ConstantKernel",
        "sklearn.gaussian_process.kernels.DotProduct",
        "sklearn.gaussian_process.kernels.Matern",
        "sklearn.gaussian_process.kernels.Product",
        "sklearn.gaussian_process.kernels.RBF",
        "sklearn.gaussian_process.kernels.RationalQuadratic",
        "sklearn.gaussian_process.kernels.Sum",
        "sklearn.gaussian_process.kernels.WhiteKernel",
        "sklearn.metrics._dist_metrics.EuclideanDistance",
        "sklearn.metrics._dist_metrics.EuclideanDistance32",
        "sklearn.metrics._dist_metrics.EuclideanDistance64",
        "sklearn.metrics._dist_metrics.ManhattanDistance",
        "sklearn.metrics._dist_metrics.ManhattanDistance32",
        "sklearn.metrics._dist_metrics.ManhattanDistance64",
        "sklearn.metrics._scorer._PassthroughScorer",
        "sklearn.model_selection._split.KFold",
        "sklearn.model_selection._split.StratifiedKFold",
        "sklearn.neighbors._ball_tree.BallTree",
        "sklearn.neighbors._ball_tree.BallTree32",
        "sklearn.neighbors._ball_tree.BallTree64",
        "sklearn.neighbors._kd_tree.KDTree",
        "sklearn.neighbors._kd_tree.KDTree32",
        "sklearn.neighbors._kd_tree.KDTree64",
        "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
        "sklearn.neural_network._stochastic_optimizers.SGDOptimizer",
        "sklearn.tree._tree.Tree",
        "xgboost.core.Booster",
        "xgboost.sklearn.XGBClassifier",
        "xgboost.sklearn.XGBRFClassifier",
        "xgboost.sklearn.XGBRFRegressor",
        "xgboost.sklearn.XGBRanker",
        "xgboost.sklearn.XGBRegressor",
    }
)


def trusted_types(backend_config: Mapping[str, str]) -> frozenset[str]:
    """Return the types that the server trusts: its own list, and those of the command line."""
    more = backend_config.get(TRUSTED_TYPES, "")
    return _TRUSTED | {name.strip() for name in more.split(",") if name.strip()}


def not_trusted(types: Iterable[str], backend_config: Mapping[str, str]) -> list[str]:
    """Return which of the `types` of a file the server does not trust."""
    return sorted(set(types) - trusted_types(backend_config))


#: In the order in which they are looked for. Those after the first are pickles, whatever wrote them.
FILE_NAMES = ("model.skops", "model.joblib", "model.pkl", "model.pickle")

#: The setting of the server (--allow-pickle): `true`, or names of models.
ALLOW_PICKLE = "allow-pickle"

_SKOPS = ".skops"

#: How often the content of an archive is in memory while it is opened: as bytes, and as an array.
_COPIES = 2


def find_model_file(arguments: ModelArguments) -> Path:
    """Return the path of a model's file. Raises `Unavailable`."""
    folder = arguments.version_dir
    named = str(arguments.config.get("default_model_filename") or "")
    for name in (named,) if named else FILE_NAMES:
        if (folder / name).is_file():
            return folder / name
    if named:
        raise Unavailable(f"unable to find '{folder / named}' for model '{arguments.model_name}'")
    raise Unavailable(
        f"unable to find a file for model '{arguments.model_name}' in '{folder}': expected one of "
        f"{', '.join(FILE_NAMES)}, or default_model_filename in the configuration"
    )


def file_state(arguments: ModelArguments) -> tuple[object, ...]:
    """Return a value that changes with the file of a model. Raises `Unavailable` if there is none."""
    path = find_model_file(arguments)
    try:
        status = path.stat()
    except OSError as error:
        raise Unavailable(f"'{path}' of model '{arguments.model_name}' cannot be read: {error.strerror}") from error
    return path, status.st_ino, status.st_size, status.st_mtime_ns


def may_load_pickles(arguments: ModelArguments) -> bool:
    """Whether the operator has allowed pickles for this model."""
    allowed = arguments.backend_config.get(ALLOW_PICKLE, "").strip()
    if allowed.lower() in ("true", "false", ""):
        return allowed.lower() == "true"
    return arguments.model_name in {name.strip() for name in allowed.split(",")}


def check_pickles_allowed(arguments: ModelArguments, reason: str, otherwise: str) -> None:
    """Raise `Unsupported` unless the operator has allowed pickles for this model.

    `reason` says what the model is and ends with what runs code; `otherwise` is what needs no flag.
    """
    if may_load_pickles(arguments):
        return
    raise Unsupported(
        f"model '{arguments.model_name}' {reason} runs code of its author. If you trust its origin, start the server "
        f"with --allow-pickle={arguments.model_name} (or --allow-pickle=true for all models). {otherwise}"
    )


def load_estimator(arguments: ModelArguments, warn: Callable[[str], None]) -> Any:
    """Return the fitted estimator of a model. `warn` gets a line for each warning of the library.

    Nothing of a pickle is executed, or read, unless it is allowed. Raises `ServingError`.
    """
    required("sklearn.pipeline")
    path = find_model_file(arguments)
    pickled = path.suffix != _SKOPS
    if pickled:
        check_pickles_allowed(
            arguments,
            f"is a pickle ('{path.name}'), and a pickle",
            "A file of skops needs no flag: skops.io.dump(model, 'model.skops')",
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with failing_as(
            lambda error: InternalError(
                f"failed to load model '{arguments.model_name}': '{path.name}' cannot be read: "
                f"{type(error).__name__}: {error}"
            ),
            passes=ServingError,
        ):
            found = required("joblib").load(path) if pickled else _load_skops(path, arguments)
    for line in dict.fromkeys(" ".join(str(each.message).split()) for each in caught):
        warn(f"model '{arguments.model_name}': {line}")
    return found


def _load_skops(path: Path, arguments: ModelArguments) -> Any:
    skops = required("skops.io")
    _check_unpacked_size(path, arguments.model_name)
    try:
        return skops.load(path, trusted=sorted(trusted_types(arguments.backend_config)))
    except TypeError:  # skops raises it for untrusted types, and for damaged files
        refused = not_trusted(skops.get_untrusted_types(file=path), arguments.backend_config)
        if not refused:
            raise
    raise Unsupported(
        f"model '{arguments.model_name}' has types that the server does not trust: {', '.join(refused)}. If making "
        "objects of these types cannot do harm, start the server with "
        f"--backend-config={arguments.config.get('backend') or 'sklearn'},{TRUSTED_TYPES}={','.join(refused)}"
    )


def _check_unpacked_size(path: Path, model: str) -> None:
    """Raise `InvalidArgument` for an archive that needs more memory than there is: a small one may have terabytes."""
    with zipfile.ZipFile(path) as archive:
        byte_size = sum(each.file_size for each in archive.infolist())
    if _COPIES * byte_size > available_memory_byte_size():
        raise InvalidArgument(
            f"model '{model}' cannot be loaded: '{path.name}' has {byte_size} bytes when it is unpacked, and there is "
            "not memory for them"
        )
