"""`tamis settings`, and the same in docs/settings.md."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tamis.cli import app
from tamis.experiments.reference import as_markdown, as_text, sections, settings_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"


def test_every_setting_has_a_meaning():
    for name, configs in sections().items():
        for config in configs.values():
            for setting in settings_of(config):
                assert setting.meaning, f"{name}.{setting.name} of {config.__name__} has no text below it"
                assert setting.takes


def test_the_document_is_what_is_generated():
    """If not: tamis settings --markdown > docs/settings.md"""
    assert DOCUMENT.read_text(encoding="utf-8") == as_markdown() + "\n"


def test_the_command():
    found = CliRunner().invoke(app, ["settings", "training"])
    assert found.exit_code == 0, found.output
    assert "[training]  translation: " in found.stdout
    assert '  optimizer = "adam"    text\n' in found.stdout
    assert '  optimizer = "adamw"    text\n' in found.stdout  # of a language model
    assert "What makes a checkpoint the best" in found.stdout
    assert found.stdout.strip() == as_text("training")
    wrong = CliRunner().invoke(app, ["settings", "trainig"])
    assert wrong.exit_code == 1
    assert "did you mean 'training'" in wrong.output


@pytest.mark.parametrize("wanted", ["lr", "training.lr"])
def test_a_single_setting_is_found_wherever_it_is(wanted):
    found = as_text(wanted)
    assert found.startswith("[training]  translation")
    assert {line.split(" = ")[0] for line in found.splitlines() if " = " in line} == {"  lr"}
    assert "[evaluation]" not in found
    with pytest.raises(ValueError, match="there is no section and no setting 'warmpu'; did you mean 'warmup'"):
        as_text("warmpu")


@pytest.mark.parametrize("section", ["data", "text", "task", "model", "vocabulary", "decoding", "evaluation"])
def test_sections_of_all_kinds(section):
    assert f"[{section}]" in as_text(section)
