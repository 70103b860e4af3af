"""Settings and their checks: configs that check themselves, names among known ones, specs, devices and their memory."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch

LARGEST_INT = 2**31 - 1
LARGEST_SEED = 2**63 - 1
SMALL = 1 << 28
"""Bytes that are not worth a look at what is free."""

Spec = str | Mapping[str, Any]
"""A name, or a table with a name and what goes with it: {"name": "entmax", "alpha": 1.5}."""


class Config:
    """Base of the frozen config dataclasses."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from plain values; an unknown key is an error that offers the nearest known one."""
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in values:
            if key not in known:
                nearest = difflib.get_close_matches(key, known, 1, 0.0)[0]
                raise ValueError(f"{cls.__name__} has no setting {key!r}; did you mean {nearest!r}?")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]


def at_least(config: object, smallest: int, *names: str, largest: int = LARGEST_INT) -> None:
    """Raise unless each named setting is an int from `smallest` to `largest`."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise ValueError(f"{name} must be an int of at least {smallest}, got {value!r}")
        if value > largest:
            raise ValueError(f"{name} must be an int of at most {largest}, got {shown(value)}")


def optional_at_least(config: object, smallest: int, *names: str) -> None:
    """The same, for settings that may be None."""
    at_least(config, smallest, *(name for name in names if getattr(config, name) is not None))


def booleans(config: object, *names: str) -> None:
    """Raise unless each named setting is True or False: the string "False" would be true."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")


def optional_booleans(config: object, *names: str) -> None:
    """The same, for settings that may be None."""
    booleans(config, *(name for name in names if getattr(config, name) is not None))


def strings(config: object, *names: str) -> None:
    """Raise unless each named setting is a string."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a string, got {value!r}")


def optional_strings(config: object, *names: str) -> None:
    """The same, for settings that may be None."""
    strings(config, *(name for name in names if getattr(config, name) is not None))


def shares(config: object, *names: str) -> None:
    """Raise unless each named setting is a number in [0, 1]."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], got {value!r}")


def optional_shares(config: object, *names: str) -> None:
    """The same, for settings that may be None."""
    shares(config, *(name for name in names if getattr(config, name) is not None))


def numbers(config: object, *names: str, above: float | None = None) -> None:
    """Raise unless each named setting is a finite number, at least 0 or, where `above` is given, greater than that."""
    for name in names:
        value = getattr(config, name)
        wanted = "of at least 0" if above is None else f"above {above:g}"
        known = isinstance(value, int | float) and not isinstance(value, bool)
        # An int may be too large for a float, which math.isfinite does not survive.
        if not known or not abs(value) <= sys.float_info.max or (value < 0.0 if above is None else value <= above):
            raise ValueError(f"{name} must be a number {wanted}, got {value!r}")


def optional_numbers(config: object, *names: str, above: float | None = None) -> None:
    """The same, for settings that may be None."""
    numbers(config, *(name for name in names if getattr(config, name) is not None), above=above)


def readable(config: object, read: Callable[[Any], object], *names: str) -> None:
    """Raise unless each named setting is one that `read` takes."""
    for name in names:
        try:
            read(getattr(config, name))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def shown(value: Any) -> str:
    """A number for a message; whole numbers of hundreds of digits in short."""
    return f"about 2**{value.bit_length()}" if isinstance(value, int) and value.bit_length() > 64 else str(value)


def choose(kind: str, name: str, known: Iterable[str]) -> str:
    """`name`, or a ValueError that offers the nearest known one."""
    known = list(known)
    if name in known:
        return name
    if not isinstance(name, str):
        raise ValueError(f"{kind} must be one of {', '.join(known)}, got {name!r}")
    nearest = difflib.get_close_matches(name, known, 1, 0.0)[0]
    raise ValueError(f"{kind} must be one of {', '.join(known)}, got {name!r}; did you mean {nearest!r}?")


def check_switch(name: str, value: bool) -> bool:
    """A TypeError for what is neither True nor False: the text "false" would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_heads(num_heads: int, embed_dim: int | None = None) -> None:
    """At least one head, each with an equal share of `embed_dim` if that is given."""
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1:
        raise ValueError(f"num_heads must be an int of at least 1, got {num_heads!r}")
    if embed_dim is not None and (embed_dim < 1 or embed_dim % num_heads):
        raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")


def read_spec(kind: str, spec: object, known: Iterable[str], example: str) -> tuple[str, dict[str, Any]]:
    """The name that a spec gives, one of the known, and what goes with it."""
    own = dict(spec) if isinstance(spec, Mapping) else {}
    name = own.pop("name", None) if isinstance(spec, Mapping) else spec
    if not isinstance(name, str):
        raise ValueError(f'a {kind} is given by its name or a table with one, {{"name": "{example}"}}; got {spec!r}')
    return choose(kind, name, known), own


def describe_spec(name: str, own: Mapping[str, Any]) -> str:
    """A spec in a line: rope base=500000 scaling=4."""
    return " ".join([name, *(f"{key}={value}" for key, value in own.items())])


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """The device of that name if this machine has it; by default a GPU where there is one."""
    mps = torch.backends.mps.is_available()
    counts = {"cpu": 1, "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0, "mps": int(mps)}
    if device is None:
        return torch.device("cuda" if counts["cuda"] else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or (found.index or 0) >= counts.get(found.type, 0):
        here = ", ".join(f"{kind} (0 to {count - 1})" if count > 1 else kind for kind, count in counts.items() if count)
        raise ValueError(f"device must be one that is here: {here}; got {str(device)!r}")
    return found


def free_bytes(device: torch.device) -> int | None:
    """The memory that a process can still have there; None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        found = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        free = sum(int(found[name].split()[0]) for name in ("MemAvailable", "SwapFree")) * 1024
    except (OSError, KeyError, ValueError):
        return None
    with suppress(OSError, ValueError):  # of a container, whose bound may be "max"
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return free


def check_memory(needed: float, device: torch.device, what: str, lower: str) -> None:
    """Raise if more memory is needed than is free: the system would end the process without a word."""
    free = free_bytes(device) if needed > SMALL else None
    if free is not None and needed > free:
        have = f"{shown_bytes(needed)} of memory, and {shown_bytes(free)} are free"
        raise ValueError(f"{what} would take {have}: lower {lower}")


def shown_bytes(count: float) -> str:
    """Such as "1.5 GB"."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
