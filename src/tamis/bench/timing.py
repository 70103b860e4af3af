"""Fair timing on a noisy machine, and a record of the machine."""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def alternate(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Time calls in turn, so that what disturbs the machine disturbs them alike.  Milliseconds, minimum and median."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: {"min_ms": min(ms), "median_ms": statistics.median(ms)} for name, ms in times.items()}


def event_times(call: Callable[[], object], repeats: int, seconds: float = 0.15) -> dict[str, float]:
    """Microseconds of a call on the GPU, by events: median, and the spread between the fastest and slowest tenth.

    Calls are launched without waiting, as a training loop does; fewer than `repeats` if those would take longer than
    `seconds`, but at least three.
    """
    for _ in range(2):  # compiles, tunes itself, lets memory grow
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    repeats = max(3, min(repeats, int(seconds / (time.perf_counter() - began))))
    times = [1e3 * time for time in launched_times(call, repeats)]
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return {"median_us": statistics.median(times), "spread_us": tenths[-1] - tenths[0]}


def launched_times(call: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each of so many calls on the GPU, launched without waiting, as a training loop does."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def kernel_times(call: Callable[[], object], repeats: int = 5) -> dict[str, float]:
    """Microseconds that each kernel of a call takes on the GPU, by name; those of one name are summed."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profile.key_averages():
        if event.self_device_time_total > 0.0:  # calls of the driver are listed too
            name = event.key.split("(")[0]  # C++ kernels carry their arguments
            times[name] = times.get(name, 0.0) + event.self_device_time_total / repeats
    return times


def peak_gpu_memory(call: Callable[[], object]) -> int:
    """Bytes by which what is allocated on the GPU grows at most during a call."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def peak_memory(call: Callable[[], object]) -> int | None:
    """Bytes by which the process grows at most during a call; None where the system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM") - before
    del result
    return peak


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def machine() -> dict[str, Any]:
    """What ran the benchmark, as far as it matters for the numbers."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def reason(error: Exception) -> str:
    """Why a peer could not be measured, in one line: the last of its error's."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:120]


written: dict[Path, None] = {}
"""The files saved so far, which `tamis bench` names when it ends: most are saved many times as they grow."""


def save(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    written[path] = None
