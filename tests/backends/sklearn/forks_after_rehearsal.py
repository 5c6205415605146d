"""Imports the backend as a zygote does, forks, and computes with all threads of BLAS and OpenMP in the fork.

Prints the labels that the fork has computed; a fork of a process that had computed with several threads would hang.
"""

from __future__ import annotations

import os

from backends.zygote.preloader import Preloader, thread_names


def main() -> None:
    Preloader().import_backend("sklearn")
    assert len(thread_names()) == 1, thread_names()
    pid = os.fork()
    if pid == 0:
        _compute()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    raise SystemExit(os.waitstatus_to_exitcode(status))


def _compute() -> None:
    import numpy as np
    from sklearn.ensemble import HistGradientBoostingClassifier

    from backends.sklearn.library import limit_threads

    limit_threads(2)
    rows = np.random.default_rng(0).random((20_000, 8))
    labels = rows @ np.eye(8)[0] > 0.5
    assert np.allclose(np.linalg.inv(rows.T @ rows) @ (rows.T @ rows), np.eye(8))
    found = HistGradientBoostingClassifier(max_iter=3).fit(rows, labels).predict(rows)
    print((found == labels).mean() > 0.9, flush=True)


if __name__ == "__main__":
    main()
