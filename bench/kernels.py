"""What runs on a GPU, how much of the time, and whether the host waits meanwhile, by torch's profiler."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
REPLAY = "replay"


def profiled(replay: Callable[[], Any]) -> list[Any]:
    """The profiler's events of one call, in the range `REPLAY`; the last synchronisation is the profiler's own."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with (
        torch.profiler.profile(activities=activities, acc_events=True) as profile,
        torch.profiler.record_function(REPLAY),
    ):
        replay()
    return list(profile.events() or [])


def kernels(events: Iterable[Any]) -> list[str]:
    """Names of what ran on the device: kernels, copies and fills."""
    return [e.name for e in _on_device(events)]


def table(events: Iterable[Any]) -> str:
    """What ran on the device, by name: how often, its time in all and each, in microseconds; the longest first."""
    times: dict[str, list[float]] = {}
    for e in _on_device(events):
        times.setdefault(e.name, []).append(e.time_range.end - e.time_range.start)
    lines = [f"{'us':>10s} {'times':>6s} {'us each':>9s}  kernel"]
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1])):
        lines.append(f"{sum(each):10,.0f} {len(each):6d} {sum(each) / len(each):9.2f}  {name}")
    return "\n".join(lines)


def _on_device(events: Iterable[Any]) -> list[Any]:
    """A range appears there as well, and is none of them."""
    return [e for e in events if e.device_type.name != "CPU" and e.name != REPLAY]


def waits(events: Iterable[Any]) -> list[str]:
    """Names of the events within the replay in which the host waits, or a copy to it goes on."""
    events = list(events)
    window = next(e.time_range for e in events if e.name == REPLAY and e.device_type.name == "CPU")
    return [
        e.name
        for e in events
        if "Memcpy DtoH" in e.name
        or (any(sync in e.name for sync in SYNCS) and window.start <= e.time_range.start <= window.end)
    ]


def busy_share(call: Callable[[], object]) -> float:
    """The share of a call's time in which a GPU does anything: kernels, copies or fills, on whatever stream."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - began
    events = [e.time_range for e in profile.events() or [] if e.device_type.name != "CPU"]
    return covered((e.start, e.end) for e in events) / 1e6 / wall_s  # they are in microseconds


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
