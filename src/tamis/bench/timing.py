"""Fair timing on a noisy machine, and a record of the machine."""

from __future__ import annotations

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


def event_times(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Microseconds of a call on the GPU, by events: median, and the spread between the fastest and slowest tenth."""
    for _ in range(3):
        call()
    times = []
    for _ in range(max(10, repeats)):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    tenths = statistics.quantiles(times, n=10)
    return {"median_us": statistics.median(times), "spread_us": tenths[-1] - tenths[0]}


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


def save(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {path}")
