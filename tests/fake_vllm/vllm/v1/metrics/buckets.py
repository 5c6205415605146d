"""Bounds of histograms. Before version 0.19 this name was in `vllm.v1.metrics.loggers`."""


def build_1_2_5_buckets(most: int) -> list[int]:
    return [each for power in range(9) for each in (10**power, 2 * 10**power, 5 * 10**power) if each <= most]
