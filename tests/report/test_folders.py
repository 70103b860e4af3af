"""`tamis report` and `tamis plot`, on run folders."""

import json

import pytest
from typer.testing import CliRunner

from report import cases
from tamis.analysis import write_arrays
from tamis.analysis.shown import shown_arrays
from tamis.cli import app
from tamis.experiments import analysed_runs
from tamis.experiments.folder import RunFolder
from tamis.files import digest_of
from tamis.report import plots


def called(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for run in cases.three_runs()[:2]:
        folder = root / "seed1" / run.name
        folder.mkdir(parents=True)
        (folder / "analysis.json").write_text(json.dumps(run.analysis))
        write_arrays(folder / "analysis.npz", shown_arrays(run.shown))
    settings = "name = 'x'\n[data]\ntrain = 'grammar:train:10'\nvalid = 'grammar:valid:10'\n"
    entmax, softmax = root / "seed1" / "entmax", root / "seed1" / "softmax"
    (entmax / "config.toml").write_text(settings + "[model]\nmechanism = { name = 'entmax', alpha = 1.5 }\n")
    (softmax / "config.toml").write_text(settings + "[model]\ncross_mechanism = 'rela'\n")
    (entmax / "evaluation.json").write_text(json.dumps(cases.EVALUATION))
    (entmax / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in cases.RECORDS))
    return softmax, entmax


def test_a_report_is_written(folders, tmp_path):
    found = called("report", *folders, "--output", tmp_path / "new" / "report.html", "--title", "Mine & yours")
    assert found.exit_code == 0, found.output
    assert f"written: {tmp_path / 'new' / 'report.html'} (" in found.stdout
    text = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert "<title>Mine &amp; yours</title>" in text


def test_figures_are_written(folders, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots, "FIGURES", {"diversity": plots.diversity, "positions": plots.positions})
    found = called("plot", *folders, "--output", tmp_path / "figures", "--format", "svg")
    assert found.exit_code == 0, found.output
    listed = [line for line in found.stdout.splitlines() if line.endswith(".svg")]
    assert sorted(listed) == sorted(map(str, (tmp_path / "figures").iterdir()))


def test_what_stages_wrote_is_read(folders):
    softmax, entmax = analysed_runs(folders)
    assert (softmax.name, entmax.name) == ("softmax", "entmax")
    assert entmax.mechanism == "entmax alpha 1.5"
    assert softmax.mechanism.endswith("cross rela")
    assert (len(softmax.records), len(entmax.records)) == (0, len(cases.RECORDS))
    assert (softmax.evaluation, entmax.evaluation) == ({}, cases.EVALUATION)


def test_runs_are_called_as_one_says(folders, tmp_path, monkeypatch):
    named = {"dense": folders[0], "sparse, learned": folders[1]}
    assert [run.name for run in analysed_runs(named)] == list(named)
    arguments = [f"{name}={folder}" for name, folder in named.items()]
    found = called("report", *arguments, "--output", tmp_path / "report.html")
    assert found.exit_code == 0, found.output
    assert '"name":"sparse, learned"' in (tmp_path / "report.html").read_text(encoding="utf-8")
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(plots, "FIGURES", {"none": lambda runs: drawn.extend(run.name for run in runs)})
    assert called("plot", *arguments, "--output", tmp_path, "--dpi", 90).exit_code == 0
    assert drawn == list(named)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a=x", "y"], "either all runs are NAME=RUN or none is, got a=x y"),
        (["a=x", "a=y"], "each system has a name of its own, got 'a' twice"),
        (["a=x,y"], "runs are shown one by one, got several for a"),
        (["=x"], "a system is NAME=RUN[,RUN...], got '=x'"),
    ],
)
def test_names_that_do_not_tell_are_refused(arguments, message):
    for command in ("report", "plot"):
        found = called(command, *arguments)
        assert found.exit_code == 1
        assert message in found.output


def test_a_folder_with_an_equals_sign_is_a_folder(folders, tmp_path):
    odd = tmp_path / "lr=1"
    odd.mkdir()
    for path in folders[1].iterdir():
        (odd / path.name).write_bytes(path.read_bytes())
    found = called("report", odd, "--output", tmp_path / "report.html")
    assert found.exit_code == 0, found.output
    assert '"name":"lr=1"' in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["report", "plot"])
def test_a_run_that_was_not_analysed_is_told_what_to_do(name, tmp_path):
    found = called(name, tmp_path, "--output", tmp_path / "out")
    assert found.exit_code == 1
    assert f"error: {tmp_path} has not been analysed: run `tamis analyze {tmp_path}` first" in found.output
    assert not (tmp_path / "out").exists()


def test_folders_of_one_name_are_told_apart(folders, tmp_path):
    other = tmp_path / "seed2" / "entmax"
    other.parent.mkdir()
    other.symlink_to(folders[1])
    with pytest.raises(ValueError, match="each run counts once"):
        analysed_runs([folders[1], other])
    other.unlink()
    other.mkdir()
    for path in folders[1].iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    assert [run.name for run in analysed_runs([folders[1], other])] == ["seed1/entmax", "seed2/entmax"]


DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "zeros": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    "flipped": lambda content: (
        content[: len(content) // 3] + bytes([content[len(content) // 3] ^ 1]) + content[len(content) // 3 + 1 :]
    ),
    "list": lambda content: b"[]",
    "archive": lambda content: b"PK\x05\x06" + bytes(18),
}


@pytest.fixture
def signed(folders, tmp_path):
    """A run as the stages of today write it."""
    run = RunFolder(tmp_path / "run")
    for path in folders[1].iterdir():
        write_whole(run.path / path.name, path.read_bytes())
    run.write(run.analysis, {**json.loads(run.analysis.read_bytes()), "arrays": digest_of(run.arrays)})
    run.write(run.evaluation, json.loads(run.evaluation.read_bytes()))
    return run.path


def write_whole(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["analysis.json", "analysis.npz", "evaluation.json"])
@pytest.mark.parametrize("command", ["report", "plot"])
def test_a_damaged_result_is_named(signed, tmp_path, monkeypatch, command, name, damage):
    monkeypatch.setattr(plots, "FIGURES", {})
    assert called(command, signed, "--output", tmp_path / "out").exit_code == 0
    content = (signed / name).read_bytes()
    (signed / name).write_bytes(DAMAGES[damage](content))
    found = called(command, signed, "--output", tmp_path / "out")
    assert found.exit_code == 1
    assert isinstance(found.exception, SystemExit), found.exception
    assert f"error: {signed / name} is " in found.output


@pytest.mark.parametrize("damage", ["cut", "empty", "zeros", "list", "archive"])
@pytest.mark.parametrize("name", ["analysis.json", "analysis.npz", "evaluation.json"])
def test_a_damaged_result_of_before_is_named(folders, tmp_path, name, damage):
    for path in folders[1].iterdir():
        write_whole(tmp_path / "run" / path.name, path.read_bytes())
    content = (tmp_path / "run" / name).read_bytes()
    (tmp_path / "run" / name).write_bytes(DAMAGES[damage](content))
    found = called("report", tmp_path / "run", "--output", tmp_path / "out")
    if (name, damage) == ("analysis.npz", "archive"):  # whole, and without a sentence to show
        assert found.exit_code == 0
    else:
        assert isinstance(found.exception, SystemExit), found.exception
        assert str(tmp_path / "run" / name) in found.output


@pytest.mark.parametrize(
    "content", ["{}", '{"summary": 3, "sites": []}', '{"summary": {"all": {}}, "sites": {"x": null}}']
)
def test_a_table_of_something_else_is_named(folders, tmp_path, content):
    for path in folders[1].iterdir():
        write_whole(tmp_path / "run" / path.name, path.read_bytes())
    (tmp_path / "run" / "analysis.json").write_text(content)
    found = called("report", tmp_path / "run", "--output", tmp_path / "out")
    assert isinstance(found.exception, SystemExit), found.exception
    assert f"{tmp_path / 'run' / 'analysis.json'} is damaged, or of another version of tamis" in found.output


def test_an_analysis_goes_with_its_arrays(signed, tmp_path):
    write_arrays(signed / "analysis.npz", {})  # as if `analyze` had been killed between the two
    found = called("report", signed, "--output", tmp_path / "out")
    assert "analysis.npz is not what analysis.json was written with: run `tamis analyze" in found.output
