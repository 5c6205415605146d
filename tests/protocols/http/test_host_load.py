from __future__ import annotations

from protocols.http.host_load import CpuTimes, HostLoad, Memory, busy_share, parse_cpu_times, parse_memory


def test_idle_and_waiting_time_is_not_busy() -> None:
    times = parse_cpu_times("cpu  10 20 30 400 50 6 7 8 9 9\ncpu0 1 2 3\n")
    assert times == CpuTimes(total=531, idle=450)


def test_the_busy_share_is_that_of_the_time_between() -> None:
    assert busy_share(CpuTimes(100, 50), CpuTimes(200, 125)) == 0.25
    assert busy_share(CpuTimes(100, 50), CpuTimes(100, 50)) == 0.0


def test_memory_is_counted_in_bytes() -> None:
    assert parse_memory("MemTotal:  8 kB\nMemFree: 1 kB\nMemAvailable:  2 kB\n") == Memory(8192, 2048)


def test_this_machine_can_be_asked() -> None:
    load = HostLoad()
    assert 0.0 <= load.utilization() <= 1.0
    memory = load.memory()
    assert 0 < memory.available <= memory.total
