"""The colours of the page and of all pictures: one file, read by both."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def palette() -> dict[str, dict[str, Any]]:
    """Colours by theme, light and dark, and by what they are for.

    Those of runs are Okabe and Ito's, darker where they stand on white: told apart by colour-blind readers too.
    """
    return json.loads(files("tamis.report").joinpath("assets", "palette.json").read_text(encoding="utf-8"))


def as_css() -> str:
    """The custom properties of the page."""
    rules = []
    for name, colours in palette().items():
        root = ":root" if name == "light" else f":root[data-theme='{name}']"
        plain = {key: value for key, value in colours.items() if isinstance(value, str)}
        plain |= {f"run-{number}": colour for number, colour in enumerate(colours["runs"])}
        listed = " ".join(f"--{key}: {colour};" for key, colour in plain.items())
        rules.append(f"{root} {{ {listed} color-scheme: {name}; }}")
    return "\n".join(rules)
