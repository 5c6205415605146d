"""Which types a skops file may have, beside those that skops trusts itself. Pure.

skops makes objects of a type only if the type is trusted: so a file can only combine what is in this list. The list is
the server's own, whatever a file or a folder says. None of these runs code that it finds in a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
