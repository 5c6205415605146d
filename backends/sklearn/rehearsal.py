"""A model for the rehearsal of a worker before the forks: see `backends/zygote/rehearsal.py`.

The worker only loads it. What a completion calls is called here, with one thread: in a fork of a process in which
scikit-learn has computed with several, the next computation waits for threads that do not exist.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.sklearn.backend import autofill
from backends.sklearn.estimator import signature_of
from backends.sklearn.library import limit_threads, required
from kernel.machine import processor_count

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPUTES = False

#: As often as the worker is rehearsed.
_CALLS = 10


@contextmanager
def rehearsed_model() -> Iterator[str]:
    """The folder of a model whose version 1 is a pipeline in a file of skops."""
    with tempfile.TemporaryDirectory(prefix="naiad-rehearsal-") as folder:
        version = Path(folder, "1")
        version.mkdir()
        model = pipeline()
        required("skops.io").dump(model, version / "model.skops")
        limit_threads(1)
        for _ in range(_CALLS):
            autofill({"name": "m"}, model, signature_of(model, "m"), by_column=False)
        limit_threads(processor_count())
        yield folder


def pipeline() -> Any:
    """Return a pipeline of four columns as if it had been fitted: to fit one is to compute."""
    scaler = required("sklearn.preprocessing").StandardScaler()
    scaler.mean_, scaler.scale_, scaler.var_ = np.zeros(4), np.ones(4), np.ones(4)
    scaler.n_samples_seen_, scaler.n_features_in_ = 1, 4
    model = required("sklearn.linear_model").LogisticRegression()
    model.classes_, model.coef_, model.intercept_ = np.array([0, 1]), np.ones((1, 4)), np.zeros(1)
    model.n_features_in_, model.n_iter_ = 4, np.array([1], np.int32)
    return required("sklearn.pipeline").Pipeline([("scaler", scaler), ("model", model)])
