"""What goes into the page: weights to the bit that is shown, text as text, numbers that JSON has."""

import json
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from report import cases
from tamis.functional import SparseWeights
from tamis.report import content, page
from tamis.report.content import curves, figures
from tamis.report.packing import pack
from tamis.report.page import SCRIPTS, embedded


def packed(crow, col, val):
    """Of one head and so many keys as it takes."""
    parts = (torch.from_numpy(np.ascontiguousarray(part)) for part in (crow, col, val))
    return pack(SparseWeights(*parts, (1, 1, len(crow) - 1, int(col.max(initial=0)) + 1)))


def csr(weights):
    """Compressed rows of a matrix."""
    row, col = weights.nonzero()
    crow = np.concatenate(([0], np.bincount(row, minlength=len(weights)).cumsum()))
    return crow, col, weights[row, col]


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 300), st.sampled_from([0.0, 0.1, 1.0]))
def test_packed_weights_come_back(seed, rows, keys, share):
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal((rows, keys)) * (rng.random((rows, keys)) < share)).astype(np.float32)
    crow, col, val = csr(weights)
    found = cases.unpack(packed(crow, col, val), rows)
    np.testing.assert_array_equal(found[0], crow)
    np.testing.assert_array_equal(found[1], col)
    np.testing.assert_allclose(found[2], val, rtol=1.6e-5)


def test_a_weight_that_is_not_zero_stays_so():
    val = np.array([1e-45, -1e-45, 1e-38, 1.0, 25.7], np.float32)
    _, _, found = cases.unpack(packed(np.array([0, 5]), np.arange(5), val), 1)
    assert (found != 0).all()
    assert (np.sign(found) == np.sign(val)).all()
    np.testing.assert_allclose(found[2:], val[2:], rtol=1.6e-5)


def test_keys_beyond_two_bytes_take_four():
    col = np.array([3, 1 << 16, (1 << 20) + 1])
    _, found, _ = cases.unpack(packed(np.array([0, 3]), col, np.ones(3, np.float32)), 1)
    np.testing.assert_array_equal(found, col)


def test_what_is_too_large_says_so(monkeypatch):
    monkeypatch.setattr(sys.modules["tamis.report.content"], "MOST_WEIGHTS", 100)
    run = cases.three_runs()[0]
    shown = content([run])["runs"][0]["shown"]["3"]
    assert shown["weights"] == {}
    assert shown["too_large"] == sum(weights.val.numel() for weights in run.shown[3].weights.values()) > 100


def test_paths_of_a_machine_are_not_in_a_page():
    run = cases.three_runs()[0]
    data = ["/home/somebody/corpus/valid.de", "grammar:valid:500"]
    text = page(content([replace(run, analysis={**run.analysis, "data": data})]))
    assert "/home/somebody" not in text
    assert content([replace(run, analysis={**run.analysis, "data": data})])["runs"][0]["data"] == [
        "valid.de", "grammar:valid:500"
    ]  # fmt: skip


def test_weights_of_the_page_are_those_of_the_arrays():
    runs = cases.three_runs()
    made = content(runs)
    for run, shown in zip(runs, made["runs"], strict=True):
        for site in run.analysis["sites"]:
            given = shown["shown"]["3"]["weights"][site]
            heads, queries, keys = given["shape"]
            parts = map(torch.from_numpy, cases.unpack(given["data"], heads * queries))
            found = SparseWeights(*parts, (1, heads, queries, keys)).to_dense()[0].numpy()
            np.testing.assert_allclose(found, cases.dense(run, 3, site), rtol=1.6e-5, atol=1e-38)


def test_runs_share_sentences_of_the_same_text():
    runs = cases.three_runs()
    made = content(runs)
    assert len(made["sentences"]) == len(cases.LENGTHS)
    cut = {"source": ["\u2581s", "0", "\u2581s1"], "target": ["\u2581t0"]}
    whole = {"source": ["\u2581s0", "\u2581s1"], "target": ["\u2581t0"]}
    other = {"source": ["\u2581x"], "target": ["\u2581t0"]}
    three = [replace(runs[0], name=str(k), shown={}, analysis={**runs[0].analysis, "tokens": {"7": tokens}})
             for k, tokens in enumerate((cut, whole, other))]  # fmt: skip
    made = content(three)
    assert made["sentences"] == [
        {"number": 7, "source": "s0 s1", "target": "t0"},
        {"number": 7, "source": "x", "target": "t0"},
    ]
    assert [list(run["shown"]) for run in made["runs"]] == [["0"], ["0"], ["1"]]


def test_only_attention_that_looks_back_is_called_causal():
    made = content(cases.three_runs())
    for run in made["runs"]:
        assert run["causal"] == ["decoder.0.self", "decoder.1.self"]


def test_names_must_tell_runs_apart():
    run = cases.three_runs()[0]
    with pytest.raises(ValueError, match="names of their own"):
        content([run, run])
    with pytest.raises(ValueError, match="one or more runs"):
        content([])


def test_figures_leave_out_what_nobody_measured():
    run = cases.three_runs()[1]
    found = figures(run)
    assert found["bleu"]["score"] == 30.1
    assert found["aer"] == {"score": 0.4, "low": 0.35, "high": 0.45}
    assert found["tokens_per_second"] == 500.0
    bare = replace(run, evaluation={}, records=(), analysis={"summary": run.analysis["summary"]})
    assert set(figures(bare)) == {"density", "diversity", "null_share"}


def test_a_step_noted_twice_counts_as_it_was_noted_last():
    records = [{"step": 2, "loss": 5.0}, {"step": 1, "loss": 7.0}, {"step": 2, "loss": 4.0}, {"step": 3}]
    assert curves(records) == {"loss": [[1, 7.0], [2, 4.0]]}


def test_numbers_that_json_does_not_have_are_null():
    run = cases.three_runs()[0]
    records = [{"step": 1, "loss": math.nan}, {"step": 2, "loss": math.inf}, {"step": 3, "loss": 1.0}]
    made = content([replace(run, records=records)])
    assert made["runs"][0]["curves"]["loss"] == [[1, None], [2, None], [3, 1.0]]
    embedded(made)  # raises where one is left


@given(st.text())
def test_embedded_text_is_inert_and_whole(text):
    made = embedded({"text": text, text: 1})
    assert not set("<>&\u2028\u2029") & set(made)
    assert made.isascii()
    assert json.loads(made) == {"text": text, text: 1}


def test_hostile_sentences_stay_inside_their_element():
    text = page(content(cases.three_runs(), title="<script>window.harm=1</script>"))
    assert "window.harm=1</script>" not in text
    assert text.count("<script") == text.count("</script") == 3
    inside = re.search(r'<script type="application/json" id="content">(.*?)</script>', text, re.DOTALL)
    sentence = json.loads(inside[1])["sentences"][0]
    assert "<script>window.harm=1</script>" in sentence["source"]
    assert "\u2028" in sentence["source"]


def test_the_page_may_load_nothing():
    text = page(content(cases.three_runs()))
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)
    assert "innerHTML" not in text
    assert "eval(" not in text


def test_every_script_is_part_of_the_page():
    from importlib.resources import files

    assets = {path.name for path in files("tamis.report").joinpath("assets").iterdir()}
    assert assets == {*SCRIPTS, "page.html", "palette.json", "style.css"}


def test_three_runs_take_less_than_five_megabytes():
    assert len(page(content(cases.three_runs())).encode()) < 5e6
