"""Pictures of what changes with the length of a text."""

import json

import pytest

from evaluation.test_dispersion import built, texts
from tamis.evaluation.dispersion import measure_dispersion
from tamis.evaluation.lengths import LengthScore
from tamis.report.lengths import draw_dispersion, draw_lengths, plot_dispersion


@pytest.mark.parametrize("position", ["nape", "rope"])
def test_it_is_drawn(tmp_path, position):
    rows = [measure_dispersion(built("asentmax", position), texts(1, n), n, 4).to_dict() for n in (8, 16)]
    rows = json.loads(json.dumps(rows))
    draw_dispersion({"one": [rows, rows], "other": [rows]}, tmp_path / "deep" / "spread.png")
    assert (tmp_path / "deep" / "spread.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="pdf, svg, png"):
        draw_dispersion({"one": [rows]}, tmp_path / "spread.gif")


def test_runs_on_different_texts_are_not_drawn_together(tmp_path):
    for kind in ("text", "reverse"):
        (tmp_path / kind).mkdir()
        found = {"kind": kind, "mechanism": "softmax", "position": "nape", "lengths": []}
        (tmp_path / kind / "dispersion.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match="the same kind of text, got reverse and text"):
        plot_dispersion([tmp_path / "text", tmp_path / "reverse"], tmp_path / "spread.png")


def test_the_picture_has_a_line_for_each_mechanism(tmp_path):
    run = [
        LengthScore(multiple=m, length=8 * m, samples=9, exact_match=1 / m, token_accuracy=1.0, seconds=0.1)
        for m in (1, 2, 4)
    ]
    draw_lengths({"softmax": [run], "asentmax": [run, run]}, tmp_path / "new" / "picture.svg", "reverse")
    drawn = (tmp_path / "new" / "picture.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("softmax", "asentmax", "reverse"))
    with pytest.raises(ValueError, match="one of pdf, svg, png"):
        draw_lengths({}, tmp_path / "x.gif")
