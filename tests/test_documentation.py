"""The code shown to readers runs and prints what they are shown; what documents name exists; numbers are in files."""

import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

import tamis.cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n+```text\n(.*?)^```)?", flags=re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def module(path):
    """Load a script of the repository that no package holds."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_python_blocks_run(path):
    """Blocks of one document share their names, as a reader would type them; text right below is what they print."""
    namespace: dict[str, object] = {}
    for number, (block, shown) in enumerate(BLOCK.findall(path.read_text()), 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, f"{path.name} block {number}", "exec"), namespace)
        if shown:
            assert printed.getvalue() == shown


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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebooks_run(path):
    """Their numbers may differ between machines in the last digit; what they claim they assert."""
    notebooks = module(ROOT / "docs/extensions/notebooks.py")
    shown, ran = (json.loads(path.read_text()) for _ in range(2))
    notebooks.run(ran)
    for before, now in zip(notebooks.code_of(shown), notebooks.code_of(ran), strict=True):
        assert NUMBER.sub("#", notebooks.printed(now)) == NUMBER.sub("#", notebooks.printed(before))


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 2
    for path in NOTEBOOKS:
        assert path.with_suffix("").relative_to(ROOT / "docs").as_posix() in (ROOT / "docs/index.md").read_text()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_files_that_are_named_exist(path):
    """Recipes, results, scripts and pages, whether or not they are links."""
    for named in re.findall(
        r"(?<![\w/.-])((?:recipes|benchmarks|docs|examples|tests|src)/[\w./-]+\.\w+)", path.read_text()
    ):
        assert (ROOT / named).exists(), f"{path.name} names {named}"
    for named in re.findall(r"(?<![\w/.*-])([\w-]+-(?:cpu|gpu)(?:-v\d)?\.json)", path.read_text()):
        assert (ROOT / "benchmarks/results" / named).exists(), f"{path.name} names {named}"


def test_the_table_of_readme_is_what_its_files_say():
    """If not: python benchmarks/readme.py"""
    readme = module(ROOT / "benchmarks/readme.py")
    text = readme.README.read_text()
    assert readme.written(text) == text


def test_no_other_table_of_readme_has_results():
    """Numbers of tables come from files, so only the table that is written from them has any."""
    readme = module(ROOT / "benchmarks/readme.py")
    before, _, rest = readme.README.read_text().partition(readme.BEGIN)
    others = before + rest.partition(readme.END)[2]
    for line in others.splitlines():
        if line.startswith("|"):
            words = re.sub(r"\]\([^)]*\)|CTranslate2|int8", "]", line)
            assert NUMBER.findall(words) == [], line


def test_the_table_of_readme_finds_its_rows():
    readme = module(ROOT / "benchmarks/readme.py")
    rows = [{"length": 1, "causal": True}, {"length": 1, "causal": False}]
    assert readme.one(rows, length=1, causal=True) is rows[0]
    with pytest.raises(ValueError, match=r"expected one row with .*, got 2"):
        readme.one(rows, length=1)
    with pytest.raises(ValueError, match="expected <!-- written"):
        readme.written("no table")
    assert (readme.ratio(1.004), readme.ratio(1.006), readme.ratio(None)) == ("1.00", "**1.01**", "")


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_what_has_no_result_file_is_a_mark_with_one_footnote(path):
    text = path.read_text()
    notes = [line for line in text.splitlines() if line.startswith("† ")]
    assert len(notes) == (1 if "†" in text else 0)
    assert text.count("no result file") == len(notes)


def undocumented():
    pass


def fragment(x: int) -> int:
    """Of a number."""
    return x


def whole(x: int) -> int:
    """Return a number.

    Args:
        x: the number.

    Returns:
        the same.
    """
    return x


class Methods:
    """Have methods."""

    def fine(self):
        """Do something."""

    def thing(self):
        """What it is."""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (undocumented, ["no docstring"]),
        (fragment, ["begins with 'Of'", "no Args", "no Returns"]),
        (whole, []),
        (Methods, ["method thing"]),
    ],
)
def test_docstrings_that_do_not_stand_for_themselves_are_found(value, said):
    pytest.importorskip("sphinx", reason="the site is built with the extra [docs]")
    found = list(module(ROOT / "docs/extensions/every_name.py").faults(value))
    assert len(found) == len(said)
    assert all(part in fault for part, fault in zip(said, found, strict=True))


def test_a_public_name_that_is_not_in_the_reference_ends_the_build(monkeypatch):
    pytest.importorskip("sphinx", reason="the site is built with the extra [docs]")
    every_name = module(ROOT / "docs/extensions/every_name.py")
    objects = [("tamis.native.Status", "Status", "class", "reference/native", "", 1)]
    app = SimpleNamespace(config=SimpleNamespace(public_modules=["tamis.native"]))
    env = SimpleNamespace(get_domain=lambda name: SimpleNamespace(get_objects=lambda: objects))
    said = []
    monkeypatch.setattr(every_name.log, "warning", lambda text, *values: said.append(text % values))
    every_name.check(app, env)
    assert said == ["tamis.native.status is public and not in the reference"]


def test_the_page_of_commands_has_them_all():
    commands = module(ROOT / "docs/extensions/commands.py")
    app = typer.main.get_command(tamis.cli.app)
    page = "\n\n".join(commands.described("tamis", app))
    assert "## tamis train\n\n```text\ntamis train [OPTIONS] RECIPE\n```" in page
    assert "| `--shown` | Sentences whose weights are kept to look at. | `32` |" in page
    for name, command in app.commands.items():
        assert f"## tamis {name}" in page
        for own in getattr(command, "commands", {}):
            assert f"## tamis {name} {own}" in page
