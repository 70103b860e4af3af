"""Heads inside a notebook."""

import html
import json
import re

import pytest

from analysis.cases import batches, causal_lm, seq2seq, tokens
from tamis.analysis import Sentences, analyze
from tamis.report import show


def content_of(explorer):
    frame = explorer._repr_html_()
    page = html.unescape(re.search(r'srcdoc="(.*?)"></iframe>', frame, re.DOTALL)[1])
    assert page == explorer.html
    return json.loads(re.search(r'id="content">(.*?)</script>', page, re.DOTALL)[1])


def test_a_model_is_shown_on_batches():
    found = content_of(show(seq2seq(), batches(4), shown=5))
    assert [sentence["number"] for sentence in found["sentences"]] == [0, 1, 2, 3, 4]
    assert not found["overview"]
    assert found["runs"][0]["shown"]["0"]["source"]["pieces"][0].isdigit()


def test_a_language_model_has_targets_alone():
    batch = Sentences(target=tokens([[3, 4, 5], [6, 7, 8]]))
    (run,) = content_of(show(causal_lm(), iter([batch])))["runs"]
    assert run["shown"]["1"]["source"]["pieces"] == []
    assert run["causal"] == list(run["sites"])


def test_analyses_are_compared_and_tokens_named():
    every = batches(4)
    found = {name: analyze(seq2seq(name), every, shown=[1]) for name in ("softmax", "entmax")}
    sides = (lambda ids: [f"s{k}" for k in ids], lambda ids: [f"t{k}" for k in ids])
    made = content_of(show(found, pieces=sides))
    assert [run["name"] for run in made["runs"]] == ["softmax", "entmax"]
    assert made["runs"][0]["shown"]["0"]["target"]["pieces"][0].startswith("t")
    assert made["sentences"][0]["source"].startswith("s")


def test_what_cannot_be_shown():
    with pytest.raises(ValueError, match="needs batches"):
        show(seq2seq())
    with pytest.raises(ValueError, match="keeps no sentence"):
        show(analyze(seq2seq(), batches(4)))


def test_it_can_be_saved(tmp_path):
    explorer = show(seq2seq(), batches(4))
    explorer.save(tmp_path / "heads.html")
    assert (tmp_path / "heads.html").read_text(encoding="utf-8") == explorer.html
