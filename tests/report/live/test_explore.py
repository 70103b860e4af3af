"""`tamis explore`: which folders it takes, what models are called, and what it says of where it is."""

import json

import pytest
from typer.testing import CliRunner

pytest.importorskip("starlette", reason="the live page needs pip install 'tamis[explore]'")
pytest.importorskip("uvicorn", reason="the live page needs pip install 'tamis[explore]'")
pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import tamis.hf
from hf import tiny
from report.live.models import causal_lm, generator, translator
from report.live.test_server import asked
from tamis.cli import app
from tamis.report.explore import LivePage


@pytest.fixture
def explored(monkeypatch):
    """Runs the command, asks every model that it offers, and returns what it said and what they answered."""

    def go(*arguments):
        answers = {}

        def look(page):
            status, body, _ = asked(page, "GET", "/")
            assert status == 200
            content = json.loads(body.decode().split('id="content">')[1].split("</script>")[0])
            for number, run in enumerate(content["runs"]):
                text = "the old man" if run["name"] in ("words", "story") else "3 4 5"
                status, body, _ = asked(page, body={"run": number, "text": text})
                assert status == 200, body
                answers[run["name"]] = json.loads(body)["answer"]
            raise KeyboardInterrupt  # as who has seen enough does

        monkeypatch.setattr(LivePage, "wait", look)
        return CliRunner().invoke(app, ["explore", *map(str, arguments), "--device", "cpu", "--written", "4"]), answers

    return go


def test_it_takes_runs_models_and_models_of_transformers(explored, tmp_path):
    translator().save(tmp_path / "words" / "model")  # as in a run
    generator().save(tmp_path / "story")
    causal_lm().save_pretrained(tmp_path / "task")
    tiny.build("llama").save_pretrained(tmp_path / "dense")
    tamis.hf.sparsify(tiny.build("llama"), "entmax").save_pretrained(tmp_path / "sparse")
    folders = [tmp_path / "words", tmp_path / "story", tmp_path / "task"]
    result, answers = explored(*folders, "--hf", tmp_path / "dense", "--hf", tmp_path / "sparse")
    assert result.exit_code == 0, result.output
    assert list(answers) == ["words", "story", "task", "dense", "sparse"]
    assert all(isinstance(answer, str) for answer in answers.values())
    assert result.stdout.splitlines()[-1] == "stopped"  # progress bars go elsewhere
    port = result.stdout.split("http://127.0.0.1:")[1].split("/")[0]
    assert f"ssh -L {port}:127.0.0.1:{port} HOST" in result.stdout


def test_models_are_told_apart(explored, tmp_path):
    for name in ("words", "story"):
        generator().save(tmp_path / name / "model")
    _, answers = explored(tmp_path / "words" / "model", tmp_path / "story" / "model")
    assert list(answers) == ["words", "story"]
    _, answers = explored(f"words={tmp_path / 'story'}")
    assert list(answers) == ["words"]
    result, answers = explored(tmp_path / "words", tmp_path / "words" / "model")
    assert (result.exit_code, answers) == (1, {})
    assert "NAME=FOLDER, got ['words', 'words']" in result.output
    result, _ = explored()
    assert "name one or more models" in result.output
