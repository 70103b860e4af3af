"""The page itself: one HTML file with its style, its script and its numbers inside."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from tamis.report.palette import as_css, palette

SCRIPTS = (
    "dom.js", "theme.js", "numbers.js", "data.js", "svg.js", "chart.js", "figures.js", "training.js", "sparsity.js",
    "roles.js", "tables.js", "named.js", "overview.js", "state.js", "tiles.js", "matrix.js", "links.js", "heads.js",
    "rows.js", "writing.js", "live.js", "explorer.js", "keyboard.js", "main.js",
)  # fmt: skip
"""In the order in which they are put together."""


def page(content: Mapping[str, Any], *, live: bool = False) -> str:
    """Write the page for what :func:`tamis.report.content` made.  It asks no network for anything, and may not.

    The page of a server, `live`, may ask that server and nobody else.

    Args:
        content: plain values.
        live: of a server, which the page may ask.

    Returns:
        the page as HTML.
    """
    script = "'use strict';\n(() => {\n" + "\n".join(map(_asset, SCRIPTS)) + "\n})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    asked = "'self'" if live else "'none'"
    parts = {
        "title": html.escape(str(content["title"])),
        "policy": f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src blob: data:; "
        f"connect-src {asked}; base-uri 'none'; form-action 'none'",
        "style": f"{as_css()}\n{_asset('style.css')}",
        "palette": embedded(palette()),
        "content": embedded(content),
        "script": script,
    }
    # Cut once and put together: what is filled in is never searched for places to fill.
    pieces = _asset("page.html").split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled)


def embedded(value: Any) -> str:
    """JSON that may stand inside a script element: ASCII, and nothing in it can end the element or begin another."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return files("tamis.report").joinpath("assets", name).read_text(encoding="utf-8")
