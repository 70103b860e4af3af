"""The code shown to readers runs, and the links between documents lead somewhere."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from tamis.mechanisms import MECHANISMS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_python_blocks_run(path):
    """Blocks of one document share their names, as a reader would type them."""
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    namespace: dict[str, object] = {}
    before = set(MECHANISMS)
    try:
        for number, block in enumerate(blocks, 1):
            exec(compile(block, f"{path.name} block {number}", "exec"), namespace)
    finally:  # what a page registers is its own
        for name in set(MECHANISMS) - before:
            del MECHANISMS[name]


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


def result(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def test_figures_of_the_first_screen_are_those_of_their_files():
    attention, gpu = result("attention-cpu-v4")["rows"], result("kernels-short-gpu")["rows"]
    translation = result("decode-cpu")["rows"]["base-1-5-equal"]["over_ctranslate2_fp32"]

    def on_cpu(batch, length):
        found = next(row["over_sdpa"] for row in attention if (row["batch"], row["length"]) == (batch, length))
        return found["learned"], found["alpha 1.5"]

    def on_gpu(length):
        times = next(row["times"] for row in gpu if (row["length"], row["shape"]) == (length, "causal"))
        return tuple(times[name]["both_us"] / times["sdpa flash"]["both_us"] for name in ("learned alpha", "alpha 1.5"))

    expected = {
        "8 texts of 1,024 tokens": on_cpu(8, 1024),
        "64 sentences of 32 words": on_cpu(64, 32),
        "beam 5, one sentence": (translation["entmax fp32"], translation["entmax15 fp32"]),
        "causal, 128 tokens": on_gpu(128),
        "causal, 512 tokens": on_gpu(512),
    }
    screen = (ROOT / "README.md").read_text().partition("## Two commands")[0]
    for name, figures in expected.items():
        line = next(line for line in screen.splitlines() if name in line)
        assert line.endswith("| " + " | ".join(f"{figure:.2f}" for figure in figures) + " |"), line
    seeds = result("demo-seeds-cpu")["runs"]
    for arm, label in (("softmax", "| softmax |"), ("entmax", "| alpha-entmax, learned |"), ("rela", "| ReLA-g |")):
        own = [run for run in seeds if run["arm"] == arm and not run["changes"]]
        line = next(line for line in screen.splitlines() if line.startswith(label))
        assert f"| {fmean(run['bleu'] for run in own):.1f} +-" in line
        assert f"| {100 * fmean(run['aer'] for run in own):.1f} +-" in line
