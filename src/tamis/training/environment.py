"""What the bits of a run depend on besides its recipe: recorded with every checkpoint, compared when it goes on."""

from __future__ import annotations

import torch

from tamis.functional import attention_backends
from tamis.training.distributed import Process

Environment = dict[str, str | int]


def environment(process: Process) -> Environment:
    """Describe where this process and those beside it run."""
    device = process.device
    query = torch.empty(1, 1, 1, 16, device=device)
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processes": process.world * process.per_row,
        "processes of a sequence": process.per_row,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "attention": attention_backends(query, query, query).chosen,
    }


def differences(before: Environment, now: Environment) -> str:
    """What has changed, for people; empty where the run goes on to the bit."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    return ", ".join(f"{name} {before[name]} then and {now[name]} now" for name in changed)
