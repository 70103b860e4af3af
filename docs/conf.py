"""How the site is built: `make docs`.  A warning is an error, so a link that leads nowhere ends the build."""

import os
import sys
from pathlib import Path

import tamis

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "Tamis"
author = "the authors of Tamis"
version = release = tamis.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "every_name",
    "formulas",
    "notebooks",
    "commands",
    "repository",
]
exclude_patterns = ["extensions", "README.md"]
default_role = "literal"
html_theme = "furo"
html_title = "Tamis"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "katex"
html_show_copyright = False
html_copy_source = False

# Where links to files of the repository lead: beside the site, as `make docs` lays it, or wherever it is published.
repository = os.environ.get("TAMIS_REPOSITORY", "")

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4
myst_fence_as_directive = ["math"]
myst_url_schemes = ["http", "https", "mailto"]
suppress_warnings = ["myst.xref_missing"] if os.environ.get("TAMIS_DRAFT") else []

public_modules = [
    f"tamis{name}"
    for name in (
        *("", ".nn", ".mechanisms", ".positions", ".models", ".distributions", ".hf"),
        *(".training", ".decoding", ".evaluation", ".analysis", ".report", ".data", ".native"),
        *(".experiments", ".parallel"),
    )
]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
copybutton_prompt_text = "$ "
