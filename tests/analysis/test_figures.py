"""Figures of heads are declared once: what is declared appears everywhere."""

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.cases import batches, seq2seq
from tamis import analysis, evaluation
from tamis.analysis import analyze, results
from tamis.analysis import figures as declared
from tamis.analysis.rows import over_rows
from tamis.report import ReportRun, content

DOCS = Path(__file__).parent.parent.parent / "docs" / "analysis.md"


def test_a_figure_that_is_declared_appears_everywhere(monkeypatch):
    largest = declared.Figure(
        name="largest", title="largest", about="mean of the largest weight", role="sharp", threshold=0.01,
        sums=lambda rows, queries, keys: over_rows(rows.p.amax(-1), rows.seen),
    )  # fmt: skip
    for module in (declared, results, analysis.analyze.__globals__):
        if isinstance(module, dict):
            monkeypatch.setitem(module, "FIGURES", (*declared.FIGURES, largest))
        else:
            monkeypatch.setattr(module, "FIGURES", (*module.FIGURES, largest))
    monkeypatch.setattr(results.Thresholds, "DEFAULTS", {**results.Thresholds.DEFAULTS, "largest": 0.01})
    found = analyze(seq2seq(), batches(4), shown=[0])
    values = found.to_dict()
    assert found.sites["encoder.0.self"].largest == pytest.approx(values["sites"]["encoder.0.self"]["largest"])
    assert len(values["sites"]["encoder.0.self"]["largest"]) == 4
    assert "sharp" in {named["role"] for named in values["named_heads"]}
    assert values["thresholds"]["largest"] == 0.01
    tokens = {"0": {"source": ["a"] * 7, "target": ["b"] * 7}}
    made = content([ReportRun(name="one", analysis={**values, "tokens": tokens}, shown=found.shown)])
    assert made["columns"][-1] == {
        "name": "largest", "title": "largest", "about": "mean of the largest weight", "digits": 3, "role": "sharp",
        "threshold": "largest",
    }  # fmt: skip


def test_what_is_of_each_distance_has_a_column_for_each():
    columns = [column for column in declared.page_columns() if column["name"] == "confidence"]
    assert [column["place"] for column in columns] == list(range(7))
    assert [column["title"] for column in columns if column["listed"]] == ["before", "itself", "after"]


def test_the_documents_have_the_declared_table():
    assert declared.describe() in DOCS.read_text(encoding="utf-8")


def test_a_threshold_that_nobody_declared_is_refused():
    with pytest.raises(ValueError, match="did you mean 'interrogation'"):
        results.Thresholds(interogation=0.5)


def test_an_unknown_figure_names_those_there_are():
    site = analyze(seq2seq(), batches(4)).sites["encoder.0.self"]
    with pytest.raises(AttributeError, match="has the figures density"):
        _ = site.sharpness
    assert replace(site).density == site.density


@pytest.mark.parametrize(
    ("module", "name", "new"),
    [
        (analysis, "show", "tamis.report.show"),
        (analysis, "Explorer", "tamis.report.Explorer"),
        (evaluation, "draw_lengths", "tamis.report.lengths.draw_lengths"),
        (evaluation, "draw_dispersion", "tamis.report.lengths.draw_dispersion"),
    ],
)
def test_old_names_say_what_they_are_called_now(module, name, new):
    with pytest.raises(ImportError, match=f"is called {new} now"):
        getattr(module, name)
    with pytest.raises(AttributeError, match="no attribute 'sho'"):
        _ = module.sho
