"""Sequences to learn from that no file holds: the tasks of the ASEntmax paper, https://arxiv.org/abs/2506.16640

Where the paper leaves something open, the docstring of a task says what is taken here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tamis.data.tasks.base import SPLITS, Sequences, SequenceTask, distinct, stream
from tamis.data.tasks.recall import MQMTAR, MaxRetrieval, Passkey
from tamis.data.tasks.strings import Copy, Reverse, Sort, TwoBack
from tamis.data.tasks.tracking import FlipFlop, LocalCount
from tamis.plugins import Registry
from tamis.settings import choose

TASKS: Registry[type[SequenceTask]] = Registry(
    {
        "mqmtar": MQMTAR,
        "sort": Sort,
        "reverse": Reverse,
        "copy": Copy,
        "flip_flop": FlipFlop,
        "two_back": TwoBack,
        "local_count": LocalCount,
        "max_retrieval": MaxRetrieval,
        "passkey": Passkey,
    }
)
"""A new task is put in here under its name."""


def build_task(name: str, **options: Any) -> SequenceTask:
    """The task of that name, with its own options."""
    kind = TASKS[choose("task", name, TASKS)]
    known = [field.name for field in dataclasses.fields(kind)]
    for option in options:
        if option not in known:
            raise ValueError(f"task {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}")
    return kind(**options)


__all__ = [
    "MQMTAR",
    "SPLITS",
    "TASKS",
    "Copy",
    "FlipFlop",
    "LocalCount",
    "MaxRetrieval",
    "Passkey",
    "Reverse",
    "SequenceTask",
    "Sequences",
    "Sort",
    "TwoBack",
    "build_task",
    "distinct",
    "stream",
]
