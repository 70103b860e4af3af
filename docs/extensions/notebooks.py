"""Notebooks are pages: text as it is, code with what it printed.  Needs no Jupyter.

    python docs/extensions/notebooks.py docs/tutorials/learn-alphas.ipynb

runs a notebook and writes down what its cells print.  A test runs them too.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run(notebook: dict[str, Any]) -> None:
    """Run the cells of code in order and write what they print into their outputs."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(code_of(notebook), 1):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
        text = out.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []


def code_of(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    """Return what a cell of code printed when the notebook was written."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def page(notebook: dict[str, Any]) -> str:
    """Return the notebook in Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        if text := printed(cell):
            parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def read(app, name, source):
    if app.env.doc2path(name).suffix == ".ipynb":
        source[0] = page(json.loads(source[0]))


def setup(app):
    app.add_source_suffix(".ipynb", "markdown")
    app.connect("source-read", read, priority=100)  # before links are looked at
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        written = json.loads(path.read_text())
        run(written)
        path.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
