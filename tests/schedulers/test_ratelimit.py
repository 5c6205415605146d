"""The rate limiter: resources, priorities, and the order of those that wait."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.errors import InvalidArgument
from schedulers.ratelimit import GLOBAL, PER_DEVICE, InstanceNeeds, RateLimiter, Resource, parse_limits

GPU = Resource("GPU")


class Runner:
    """An instance that starts an execution whenever it may, as long as it has requests."""

    def __init__(self, limiter: RateLimiter, name: str, needs: InstanceNeeds, log: list[str]) -> None:
        self.needs, self.executions = needs, 0
        self.queued = 0
        self.running = 0
        self._limiter, self._name, self._log = limiter, name, log

    def submit(self, count: int = 1) -> None:
        self.queued += count
        self.wake()

    def wants_to_run(self) -> bool:
        return self.queued > 0 and not self.running

    def wake(self) -> None:
        if self.wants_to_run() and self._limiter.may_start(self):
            self._limiter.started(self)
            self.queued -= 1
            self.running = 1
            self._log.append(self._name)

    def end(self) -> None:
        assert self.running
        self.running = 0
        self._limiter.ended(self)
        self.wake()
        self._limiter.wake_waiting()


class Case:
    """A limiter and instances with one execution at a time."""

    def __init__(self, limits: list[str] | None = None) -> None:
        self.limiter = RateLimiter(parse_limits(limits or []))
        self.log: list[str] = []
        self.runners: dict[str, Runner] = {}

    def add(self, name: str, count: int = 1, priority: int = 1, resource: Resource = GPU) -> Runner:
        needs = InstanceNeeds({resource: count} if count else {}, priority)
        self.limiter.register(name, [needs])
        runner = self.runners[name] = Runner(self.limiter, name, needs, self.log)
        return runner


def test_instances_whose_resources_are_free_run_side_by_side() -> None:
    case = Case(["GPU:2"])
    for name in "abc":
        case.add(name).submit()
    assert case.log == ["a", "b"]
    case.runners["a"].end()
    assert case.log == ["a", "b", "c"]


def test_without_limits_there_is_as_much_as_the_instance_needs_that_needs_most() -> None:
    case = Case()
    case.add("small", 2)
    case.add("large", 4)
    for runner in case.runners.values():
        runner.submit(2)
    assert case.log == ["small"], "large needs all four"
    case.add("another", 2).submit()
    assert case.log == ["small"], "large is before it, and lacks a resource that it would take"
    case.runners["small"].end()
    assert case.log == ["small", "large"]


def test_an_instance_without_resources_never_waits() -> None:
    case = Case()
    case.add("a").submit(5)
    case.add("free", 0).submit()
    assert case.log == ["a", "free"]


def test_instances_that_wait_run_in_turn() -> None:
    case = Case(["GPU:1"])
    for name in "abc":
        case.add(name).submit(4)
    for _ in range(8):
        next(each for each in case.runners.values() if each.running).end()
    assert case.log == ["a", "b", "c", "a", "b", "c", "a", "b", "c"]


def test_an_instance_of_priority_two_runs_half_as_often() -> None:
    case = Case(["GPU:1"])
    case.add("often", priority=1).submit(100)
    case.add("seldom", priority=2).submit(100)
    for _ in range(59):
        next(each for each in case.runners.values() if each.running).end()
    assert (case.log.count("often"), case.log.count("seldom")) == (40, 20)


def test_an_instance_that_needs_much_is_not_passed_for_ever_by_those_that_need_little() -> None:
    case = Case(["GPU:4"])
    small = [case.add(f"small{number}", 1) for number in range(4)]
    for each in small:
        each.submit(10)
    for each in small:
        each.end()
    case.add("large", 4).submit()
    assert "large" not in case.log
    for each in small:
        if each.running:
            each.end()
    assert case.log[-1] == "large"
    case.runners["large"].end()
    assert sum(each.running for each in small) == 4


def test_instances_of_another_resource_do_not_wait_for_it() -> None:
    case = Case(["GPU:1", "DISK:1"])
    case.add("a").submit()
    case.add("b").submit()
    case.add("c", resource=Resource("DISK")).submit()
    assert case.log == ["a", "c"]


def test_an_instance_whose_requests_are_gone_keeps_nobody_waiting() -> None:
    case = Case(["GPU:1"])
    case.add("a").submit()
    case.add("cancelled").submit()
    case.add("b").submit()
    case.runners["cancelled"].queued = 0
    case.runners["a"].end()
    assert case.log == ["a", "b"]


def test_an_instance_that_does_not_start_although_it_may_leaves_the_resources_to_the_next() -> None:
    case = Case(["GPU:1"])
    case.add("a").submit()
    case.add("delays").submit()
    case.add("b").submit()
    case.runners["delays"].wake = lambda: None  # type: ignore[method-assign]  # as a batcher that waits for more
    case.runners["a"].end()
    assert case.log == ["a", "b"]


def test_an_instance_that_is_new_does_not_run_alone_until_it_has_caught_up() -> None:
    case = Case(["GPU:1"])
    case.add("old").submit(1000)
    for _ in range(500):
        case.runners["old"].end()
    case.add("new").submit(10)
    for _ in range(10):
        next(each for each in case.runners.values() if each.running).end()
    assert case.log[-10:].count("new") == 5


def test_a_lost_instance_gives_its_resources_back() -> None:
    case = Case(["GPU:1"])
    lost = case.add("lost")
    lost.submit()
    case.add("a").submit()
    case.limiter.ended(lost)
    case.limiter.forget(lost)
    case.limiter.wake_waiting()
    assert case.log == ["lost", "a"]


def test_more_resources_wake_those_that_wait() -> None:
    case = Case()
    case.add("a").submit()
    case.add("b").submit()
    assert case.log == ["a"]
    case.limiter.register("large", [InstanceNeeds({GPU: 2})])
    assert case.log == ["a", "b"]
    case.limiter.unregister("large")
    case.limiter.unregister("large")


# ---- limits ----------------------------------------------------------------------------------------


def test_an_instance_that_needs_more_than_there_is_is_refused_with_tritons_text() -> None:
    limiter = RateLimiter(parse_limits(["R1:5"]))
    limiter.register("good", [InstanceNeeds({Resource("R1"): 5})])
    with pytest.raises(InvalidArgument) as error:
        limiter.register("bad", [InstanceNeeds({Resource("R1"): 6})])
    assert error.value.message == (
        'Resource count for "R1" is limited to 5 which will prevent scheduling of one or more model instances, the '
        "minimum required count is 6"
    )
    limiter.register("good", [InstanceNeeds({Resource("R1"): 4})])


def test_with_limits_a_resource_that_is_not_named_is_not_there() -> None:
    with pytest.raises(InvalidArgument, match='Resource count for "R2" is limited to 0 which'):
        RateLimiter(parse_limits(["R1:5"])).register("m", [InstanceNeeds({Resource("R2"): 1})])


def test_a_name_is_global_or_of_devices_for_all_models() -> None:
    limiter = RateLimiter()
    limiter.register("global", [InstanceNeeds({Resource("R1"): 1})])
    with pytest.raises(InvalidArgument) as error:
        limiter.register("device", [InstanceNeeds({Resource("R1", 0): 1})])
    assert error.value.message == (
        'Resource "R1" is present as both global and device-specific resource in the model configuration.'
    )


def test_limits_are_for_each_device_for_one_or_for_all() -> None:
    assert parse_limits(["a:1", "a:2:0", "a:5:0", "b:3"]) == {
        Resource("a", PER_DEVICE): 1,
        Resource("a", 0): 2,
        Resource("b", PER_DEVICE): 3,
    }
    limiter = RateLimiter(parse_limits(["a:1", "a:4:0"]))
    limiter.register("m", [InstanceNeeds({Resource("a", 0): 4}), InstanceNeeds({Resource("a", 1): 1})])
    with pytest.raises(InvalidArgument, match="is limited to 1"):
        limiter.register("n", [InstanceNeeds({Resource("a", 1): 2})])
    limiter.unregister("m")
    limiter.register("all", [InstanceNeeds({Resource("a", GLOBAL): 4})])


def test_devices_have_resources_of_their_own() -> None:
    case = Case(["a:1"])
    case.add("gpu0", resource=Resource("a", 0)).submit()
    case.add("gpu1", resource=Resource("a", 1)).submit()
    assert case.log == ["gpu0", "gpu1"]


@settings(max_examples=200)
@given(st.data())
def test_whatever_happens_no_more_is_used_than_there_is_and_everything_runs(data: st.DataObject) -> None:
    case = Case(["GPU:3", "DISK:2"])
    resources = [Resource("GPU"), Resource("DISK")]
    for number in range(data.draw(st.integers(1, 5))):
        resource = data.draw(st.sampled_from(resources))
        most = 3 if resource.name == "GPU" else 2
        case.add(str(number), data.draw(st.integers(0, most)), data.draw(st.integers(1, 3)), resource)
    runners = list(case.runners.values())
    submitted = 0
    for _ in range(data.draw(st.integers(1, 30))):
        runner = data.draw(st.sampled_from(runners))
        if runner.running and data.draw(st.booleans()):
            runner.end()
        else:
            runner.submit()
            submitted += 1
        case.limiter.check()
    while any(each.running for each in runners):
        next(each for each in runners if each.running).end()
        case.limiter.check()
    assert len(case.log) == submitted, "a request was left although nothing runs"
