"""How far the loading of the models is."""

from __future__ import annotations

from kernel.repository.load_progress import LoadProgress

S = 1_000_000_000


def test_a_step_says_what_loads_what_has_failed_and_what_took_longest() -> None:
    progress = LoadProgress()
    progress.begin(9, 10 * S)
    for number, name in enumerate("abcde"):
        progress.loads(name, (10 + number) * S)
    progress.ended("a", 12 * S)
    progress.ended("never begun", 12 * S, failed=True)
    step = progress.step(14 * S)
    assert step is not None
    assert (step.ended, step.failed, step.elapsed_ns) == (2, 1, 4 * S)
    assert step.text == ("1 of 9 models loaded, 1 failed; loading 'b', 'c', 'd' and 1 more; slowest so far 'b' (3.0 s)")


def test_the_slowest_load_may_have_ended() -> None:
    progress = LoadProgress()
    progress.begin(2, 0)
    progress.loads("slow", 0)
    progress.ended("slow", 5 * S)
    progress.loads("fast", 5 * S)
    progress.loads("fast", 6 * S)  # a second version
    step = progress.step(7 * S)
    assert step is not None
    assert step.text == "1 of 2 models loaded; loading 'fast'; slowest so far 'slow' (5.0 s)"


def test_models_that_are_copied_are_shown_until_they_are_here() -> None:
    progress = LoadProgress()
    progress.begin(5, 0)
    progress.copies("a", 1_200_000_000, 3_400_000_000)
    progress.copies("b", 0, 100_000_000)
    step = progress.step(S)
    assert step is not None
    assert step.text == "0 of 5 models loaded; 1.2 of 3.5 GB copied of 'a', 'b'"
    progress.copies("a", 3_400_000_000, 3_400_000_000)
    progress.loads("a", S)
    progress.ended("b", S, failed=True)  # its copy has failed
    step = progress.step(2 * S)
    assert step is not None
    assert step.text == "0 of 5 models loaded, 1 failed; loading 'a'; slowest so far 'a' (1.0 s)"
    progress.close()
    progress.copies("c", 0, 1)
    assert progress.step(3 * S) is None


def test_loads_of_clients_are_not_counted() -> None:
    progress = LoadProgress()
    progress.loads("m", 0)
    progress.ended("m", 1)
    assert progress.step(2) is None
    progress.begin(1, 2)
    progress.close()
    progress.loads("m", 3)
    progress.ended("m", 4)
    assert progress.step(5) is None


def test_the_first_line_names_no_slowest_model() -> None:
    progress = LoadProgress()
    progress.begin(3, 0)
    step = progress.step(1)
    assert step is not None
    assert step.text == "0 of 3 models loaded"
