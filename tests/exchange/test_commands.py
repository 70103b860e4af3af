"""The two commands, as a user calls them."""

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="what is imported is written by transformers")

from exchange import tiny
from tamis.cli import app


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_in_and_out(tmp_path):
    tiny.write_language_model(tmp_path / "theirs")
    found = call("import-hf", tmp_path / "theirs", "--output", tmp_path / "ours")
    assert found.exit_code == 0, found.output
    assert "tamis train" in found.stdout
    found = call("export", tmp_path / "ours", "--to", "hf")
    assert found.exit_code == 0, found.output
    assert (tmp_path / "ours" / "export-hf" / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("import-hf", "nowhere"), "there is no folder nowhere"),
        (("export", "nowhere", "--to", "onnx"), "there is no folder nowhere"),
        (("export", "nowhere", "--to", "onxx"), "did you mean 'onnx'"),
    ],
)
def test_errors_are_one_line(arguments, message):
    found = call(*arguments)
    assert found.exit_code != 0
    assert message in str(found.exception)
