"""The documentation as a site: it builds without a warning, loads nothing from a network, and draws its formulas."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx", reason="the site is built with the extra [docs]")
    if not (ROOT / "docs/static/katex/katex.min.js").is_file():
        pytest.skip("KaTeX is not there; make docs fetches it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", ROOT / "docs", folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_loaded_from_a_network(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(https?:[^\"]*)", page.read_text())
        assert loaded == [], f"{page.name} loads {loaded}"


def test_notebooks_and_commands_are_pages(site):
    notebook = (site / "tutorials/learn-alphas.html").read_text()
    assert "learned: [" in notebook
    assert "execution_count" not in notebook
    assert "tamis train [OPTIONS] RECIPE" in (site / "reference/commands.html").read_text()


def test_formulas_are_drawn(site):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium; make browser installs it")
    page = site / "mathematics.html"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    data = f"--user-data-dir={site / 'browser'}"
    command = [browser, *flags, offline, data, "--virtual-time-budget=10000", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    written = len(re.findall(r'class="formula"', page.read_text()))
    assert written > 100
    assert len(re.findall(r'class="katex"', shown)) == written
    assert "katex-error" not in shown
