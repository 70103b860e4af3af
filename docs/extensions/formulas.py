"""Formulas by KaTeX, from files of the site itself: `make docs` fetches them once, readers fetch nothing.

The page holds the TeX as it was written; static/formulas.js has it drawn.
"""

import html
from pathlib import Path

from docutils import nodes
from sphinx.errors import ExtensionError

KATEX = Path(__file__).parent.parent / "static" / "katex"


def inline(writer, node):
    write(writer, "span", node)


def display(writer, node):
    write(writer, "div", node)


def write(writer, tag, node):
    writer.body.append(f'<{tag} class="formula">{html.escape(node.astext())}</{tag}>')
    raise nodes.SkipNode


def need(app):
    if not (KATEX / "katex.min.js").is_file():
        raise ExtensionError(f"expected KaTeX in {KATEX}; `make docs` puts it there, by npm")


def setup(app):
    app.add_html_math_renderer("katex", (inline, None), (display, None))
    app.add_css_file("katex/katex.min.css")
    app.add_js_file("katex/katex.min.js", loading_method="defer")
    app.add_js_file("formulas.js", loading_method="defer")
    app.connect("builder-inited", need)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
