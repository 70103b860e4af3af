"""The code shown to readers runs, and the links between documents lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_python_blocks_run(path):
    """Blocks of one document share their names, as a reader would type them."""
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{path.name} block {number}", "exec"), namespace)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_local_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo\nmake test\n" in text
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {"demo", "test", "check", "slow", "gpu-test", "bench"} <= set(targets)
