"""Pages link to files of the repository as they lie beside docs/, so that the links work in a checkout and in the
site; and README, CONTRIBUTING and CHANGELOG of the repository are pages of the site."""

import os
import re
from pathlib import Path

from sphinx.util import logging

DOCS = Path(__file__).parent.parent
ROOT = DOCS.parent
PAGES = {"contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")

log = logging.getLogger(__name__)


def read(app, name, source):
    """Turn links that leave docs/ into links to the repository, and name pages as the site knows them."""
    page = DOCS / f"{name}.md"
    written = ROOT / PAGES[name] if name in PAGES else page
    text = written.read_text() if name in PAGES else source[0]
    # Where the site lies in a checkout: site/results/x.html stands as deep as docs/results/x.md.
    base = app.config.repository or os.path.relpath(ROOT, page.parent)
    own = {ROOT / file: DOCS / f"{site}.md" for site, file in PAGES.items()}
    own[ROOT / "README.md"] = DOCS / "index.md"

    def lead(match):
        target = (written.parent / match[1]).resolve()
        target = own.get(target, target)
        if not target.exists():
            log.warning("%s links to %s, which does not exist", written.name, match[1], location=name)
        inside = target.is_relative_to(DOCS) and target.suffix in (".md", ".ipynb", ".png", ".svg")
        if inside:
            return os.path.relpath(target, page.parent) + (match[2] or "")
        return f"repository:{base}/{target.relative_to(ROOT)}{match[2] or ''}"

    source[0] = LINK.sub(lead, text)


def configure(app, config):
    config.myst_url_schemes = {**dict.fromkeys(config.myst_url_schemes), "repository": "{{path}}{{fragment}}"}


def setup(app):
    app.add_config_value("repository", "", "html")
    app.connect("config-inited", configure, priority=1)
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
