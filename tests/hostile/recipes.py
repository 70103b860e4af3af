"""Recipes with settings that nobody meant: refused by a clear error, or good enough to train with."""

from __future__ import annotations

import dataclasses
import math
import random
import resource
import typing
from collections import Counter
from pathlib import Path
from typing import Any

from hostile.children import run, tamis
from hostile.harness import Part, WrongError
from hostile.worlds import KINDS, RECIPES

READ = 40
"""Recipes of a trial, of which the first two that are valid are trained with."""
SHORT = ("steps=1", "checkpoint_every=1", "compile=false")
"""Compiling takes minutes."""
MEMORY = 24 << 30
"""Bytes of addresses that a child may have, most of which libraries take and never use."""
STRANGE: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 10**6, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 0.5, 1.0, 1.5, -3.5, 1e-320, 1e38,
    1e308, math.inf, -math.inf, math.nan, True, False, "", " ", "a", "ä\u202e\U0001f642", "\x00", "../..", "/dev/null",
    "nan", "auto", "loss", "cpu", "1", "x" * 300, [], [1], [0, 0], ["a", "b"], [math.nan], [[]], [1, "a"], {},
    {"name": "entmax"}, {"name": 3}, {"name": "entmax", "alpha": math.nan}, {"name": "asentmax", "x": 1}, {"": 1}, None,
)  # fmt: skip
"""What settings may be given; None leaves the key out."""


class Recipes(Part):
    name = "recipes"
    share = 1.5

    def trial(self, draw: random.Random, folder: Path, counts: Counter[str]) -> None:
        kinds = [draw.choice(KINDS) for _ in range(READ)]
        texts = [mutated(draw, kind) for kind in kinds]
        for number, text in enumerate(texts):
            (folder / f"{number}.toml").write_bytes(text.encode(errors="surrogatepass"))
        outcome = run(lambda: read_all(len(texts)), folder)
        if outcome.code or outcome.hung:
            last = outcome.out.split()[-1:] or ["0"]
            text = texts[int(last[0].split("=")[0])]
            told = outcome.err.strip().rpartition("\n")[2] or ("hangs" if outcome.hung else f"exit code {outcome.code}")
            raise WrongError(f"reading a recipe: {told[:150]}\n{text}\n{outcome.err[-2500:]}")
        found = dict(word.split("=") for word in outcome.out.split())
        valid = [int(number) for number, state in found.items() if state == "valid"]
        counts["recipes read"] += len(texts)
        counts["recipes refused"] += len(texts) - len(valid)
        for number in valid[:2]:
            short = [word for change in SHORT for word in ("--set", f"training.{change}")]
            words = ("train", f"{number}.toml", "--output", f"run-{number}", "--device", "cpu", *short)
            outcome = run(tamis(*words, before=limited), folder)
            try:
                outcome.check(0, 1, what="train with a recipe that was read")
            except WrongError as wrong:
                raise WrongError(f"{wrong}\n{texts[number]}") from None
            counts["recipes trained with"] += 1


def limited() -> None:
    """Have too much memory be an error of this process, not of the machine."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def read_all(number: int) -> None:
    """Read recipes, and say of each whether it is valid; anything but an expected error ends it."""
    from tamis.experiments import read_recipe

    for index in range(number):
        print(index, end="", flush=True)
        try:
            experiment = read_recipe(f"{index}.toml")
        except (ValueError, OSError) as error:
            if not str(error) or len(str(error)) > 8000:
                raise
            print("=refused", flush=True)
            continue
        Path("again.toml").write_bytes(experiment.to_toml().encode())
        if read_recipe("again.toml").to_toml() != experiment.to_toml():
            raise AssertionError("written and read again it is another recipe")
        print("=valid", flush=True)


def mutated(draw: random.Random, kind: str) -> str:
    """The TOML of a tiny recipe with a few settings changed, or torn as text."""
    import tomllib

    from tamis.experiments import KINDS as KNOWN
    from tamis.experiments.recipe import as_toml

    tables = tomllib.loads(RECIPES[kind])
    section_of = {"translation": "data", "language": "text", "task": "task"}
    experiment = KNOWN[section_of[kind]]
    sections = {**experiment.sections(), "model": experiment.model_class}
    for _ in range(draw.choice((1, 1, 2, 4))):
        name, config = draw.choice([*sections.items()])
        known = [field.name for field in dataclasses.fields(config)]
        key = draw.choice([*known, *known, "stepz", "ä ö", ""])
        value = draw.choice(STRANGE)
        if draw.random() < 0.5:  # nearly right
            default = next((field.default for field in dataclasses.fields(config) if field.name == key), None)
            value = near(draw, default, value)
        if draw.random() < 0.05:
            tables[name] = value
        elif isinstance(tables.get(name, {}), dict):
            tables[name] = {**tables.get(name, {}), key: value}
    if draw.random() < 0.1:
        tables[draw.choice(("name", "description", "plugins", "arms", "nothing"))] = draw.choice(STRANGE)
    text = as_toml(typing.cast(dict[str, Any], quoted(tables)))
    if draw.random() < 0.1:
        place = draw.randrange(len(text))
        text = (
            text[:place] + draw.choice(("", "\x00", '"', "[", "\ud800", "= =", "\n[data]\n", text)) + text[place + 1 :]
        )
    return text


def quoted(value: Any) -> Any:
    """Keys as TOML needs them."""
    if not isinstance(value, dict):
        return value
    bare = str.isidentifier
    return {key if bare(key) and key.isascii() else f"'{key}'": quoted(item) for key, item in value.items()}


def near(draw: random.Random, default: Any, otherwise: Any) -> Any:
    """A value that is like the default of a setting."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return max(0, default + draw.choice((-1, 1, 2, 5)))
    if isinstance(default, float):
        return default * draw.choice((0.0, 0.5, 2.0, 1e3))
    return default if isinstance(default, str) else otherwise
