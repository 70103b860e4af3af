"""Pictures write what fonts there are for, and say what there are none for."""

import logging
from dataclasses import replace

import pytest

from report import cases

pytest.importorskip("matplotlib")

from tamis.report import fonts, plots

LATIN = frozenset(range(32, 0x250))
FAMILIES = {
    "DejaVu Sans": LATIN,
    "Odd Symbols": frozenset({0x3053, 0x3093}),
    "Noto Sans CJK JP": frozenset(range(0x3040, 0x30FF)) | frozenset(range(0x4E00, 0x9FFF)),
    "Noto Sans Thai": frozenset(range(0x0E00, 0x0E7F)),
}


@pytest.fixture
def families(monkeypatch):
    monkeypatch.setattr(fonts, "coverage", lambda: FAMILIES)


def test_a_script_gets_a_font_that_has_it(families):
    assert fonts.chosen(set("plain \u0394")) == (["DejaVu Sans"], {"Greek": "\u0394"})
    found, missing = fonts.chosen(set("a \u3053\u3093\u306b \u6f22\u5b57 \u0e2a\u0e27"))
    assert found == ["DejaVu Sans", "Noto Sans CJK JP", "Noto Sans Thai"]
    assert missing == {}


def test_what_no_font_has_is_named(families, caplog):
    with caplog.at_level(logging.WARNING, "tamis"), fonts.fonts_for(["\ud55c\uad6d", "a\u200d\n"]):
        pass
    (message,) = [record.getMessage() for record in caplog.records]
    assert "no font here has the Hangul characters of the text, such as" in message


def test_pictures_ask_for_the_fonts_of_their_tokens(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(fonts, "chosen", lambda characters: (asked.append(characters), (["DejaVu Sans"], {}))[1])
    monkeypatch.setattr(plots, "FIGURES", {"attention": plots.attention})
    run = cases.three_runs()[0]
    tokens = {"0": {"source": ["\u3053"] * 6, "target": ["b"] * 5}}
    plots.plot([replace(run, analysis={**run.analysis, "tokens": tokens})], tmp_path, "svg")
    assert "\u3053" in asked[0]


def test_fonts_of_this_machine_are_read():
    assert ord("a") in fonts.coverage()["DejaVu Sans"]
