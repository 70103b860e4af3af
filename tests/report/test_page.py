"""What a reader of the page met and should not: each defect in a real browser, and accessibility by axe."""

import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from report import cases
from report.browser import MISSING, browsing
from tamis.analysis import ShownSentence
from tamis.functional import SparseWeights
from tamis.report import content, page

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

DESKTOP, PHONE = (1280, 900), (390, 800)
AXE = Path(__file__).parent.parent.parent / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="module")
def browser():
    with browsing() as window:
        yield window


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page of some runs at a place."""

    def go(runs, hash_="", size=DESKTOP, dark=False):
        path = tmp_path / "report.html"
        path.write_text(page(content(runs, "A report")), encoding="utf-8")
        browser.open("about:blank")
        browser.screen(*size, dark=dark)
        browser.open(path.as_uri() + hash_)
        browser.until("return document.body.dataset.ready")
        if hash_ not in ("", "#overview"):
            browser.until("return location.hash === document.body.dataset.drawn")
        return browser

    yield go
    assert browser.complaints() == []


def named(run, tokens, weights=None, number=0):
    """A run with one sentence of these tokens, and weights of a head (Lq, Lk) in every layer if they are given."""
    analysis = {**run.analysis, "tokens": {str(number): tokens}}
    if weights is None:
        return replace(run, analysis=analysis)
    row, col = weights.nonzero()
    crow = np.concatenate(([0], np.bincount(row, minlength=len(weights)).cumsum()))
    size = len(col)
    four = torch.from_numpy(np.concatenate([[0], *(crow[1:] + head * size for head in range(4))]))
    parts = torch.from_numpy(np.tile(col, 4)), torch.from_numpy(np.tile(weights[row, col], 4).astype(np.float32))
    sparse = SparseWeights(four, *parts, (1, 4, *weights.shape))
    ids = torch.zeros(1, dtype=torch.long)
    shown = ShownSentence(target=ids, source=ids, weights=dict.fromkeys(run.analysis["sites"], sparse))
    return replace(run, analysis=analysis, shown={number: shown})


def long_tokens(size):
    return {side: [f"\u2581{side[0]}{place}" for place in range(size)] for side in ("source", "target")}


def test_the_header_is_seen_on_load(opened):
    browser = opened(cases.three_runs())
    assert browser.run("return scrollY") == 0
    top = browser.run("return document.querySelector('h1').getBoundingClientRect().top")
    assert 0 <= top < 60
    browser.run("location.hash = '#overview'")
    assert browser.run("return scrollY") == 0


def test_the_header_and_the_contents_stay(opened):
    browser = opened(cases.three_runs())
    browser.run("[...document.querySelectorAll('#contents button')].at(-2).click()")
    found = browser.run(
        "const top = (name) => document.querySelector(name).getBoundingClientRect().top;"
        "return [scrollY, top('h1'), top('#contents'), top('#section-what-heads-do'),"
        " document.activeElement.textContent]"
    )
    assert found[0] > 1000
    assert 0 <= found[1] < found[2] < found[3] < 300
    assert found[4] == "What heads do"


@pytest.mark.parametrize("view", ["matrix", "links"])
def test_labels_of_long_sentences_are_thinned_and_the_focused_one_is_there(opened, view):
    weights = np.eye(90) * 0.5 + np.eye(90, k=-1)[:, :] * 0.5
    run = named(cases.three_runs()[1], long_tokens(90), weights)
    browser = opened([run], f"#entmax/cross/0/0/0?view={view}&row=41")
    ink = (
        "const [plain, over] = document.querySelectorAll('.stack canvas');"
        "const count = (canvas, from) => { const { data, width, height } = canvas.getContext('2d')"
        ".getImageData(0, 0, canvas.width, canvas.height); let dark = 0;"
        "for (let y = from; y < height; y++) for (let x = 0; x < 40; x++)"
        " if (data[4 * (y * width + x) + 3] > 100 && data[4 * (y * width + x) + 1] < 150) dark += 1; return dark };"
        "return [count(plain, 60), count(over, 60)]"
    )
    plain, over = browser.run(ink)
    assert (plain if view == "matrix" else over) > 200, "labels of rows are written"
    assert over > 20, "the chosen row is written"
    assert browser.run("return document.querySelector('.word').textContent") == "t41"


def test_an_informative_row_is_chosen_and_the_pointer_is_followed(opened):
    weights = np.zeros((6, 5), np.float32)
    weights[3, 1:3] = 0.9, 0.1
    tokens = {"source": [f"\u2581s{k}" for k in range(5)], "target": ["<s>", *(f"\u2581t{k}" for k in range(1, 6))]}
    browser = opened([named(cases.three_runs()[2], tokens, weights)], "#rela/cross/0/0/0")
    word = "return document.querySelector('.word').textContent"
    assert browser.run(word) == "t3"
    box = browser.run("return document.querySelector('.over').getBoundingClientRect().toJSON()")
    x, last = box["left"] + box["width"] / 2, box["bottom"] - 12
    browser.point(x, last)
    assert browser.run(word) == "t5"
    browser.point(x, 5)
    assert browser.run(word) == "t3", "back to the row that was chosen"
    browser.point(x, last, click=True)
    browser.until("return location.hash.endsWith('row=5')")
    browser.point(x, 5)
    assert browser.run(word) == "t5", "a press keeps it"


def test_links_fade_have_a_threshold_and_heads_over_one_another(opened):
    rng = np.random.default_rng(0)
    run = named(cases.three_runs()[0], long_tokens(30), rng.dirichlet(np.ones(30), 30))
    browser = opened([run], "#softmax/cross/0/0/0?view=links")
    note = "return document.querySelector('.note').textContent"
    assert "weaker ones are not" in browser.run(note), "a dense head is not fog"
    opacity = "return getComputedStyle(document.querySelector(`[data-overlay='${args[0]}']`)).opacity"
    assert browser.run(opacity, 0) == "1", "the head that is always drawn looks switched on"
    picture = "return document.querySelector('.stack canvas').toDataURL()"
    one = browser.run(picture)
    browser.run("document.querySelector('[data-overlay=\"2\"]').click()")
    assert browser.run(picture) != one
    assert browser.run("return document.querySelector('[data-overlay=\"2\"]').getAttribute('aria-pressed')") == "true"
    browser.run("document.querySelector('[data-overlay=\"2\"]').click()")
    assert browser.run(picture) == one
    browser.run(
        "const s = document.querySelector('.controls.small input'); s.value = 0; s.dispatchEvent(new Event('input'))"
    )
    assert browser.run(note) == ""
    box = browser.run("return document.querySelector('.over').getBoundingClientRect().toJSON()")
    browser.point(box["left"] + 15, box["top"] + 60)
    assert float(browser.run("return document.querySelector('.stack canvas').style.opacity")) < 0.3


def test_text_is_shown_as_it_was_written(opened):
    text = "\uff21\u3053\u3093 \u2603x"  # full-width A, which becomes A; a snowman that the vocabulary does not know
    spans = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], None]
    tokens = {
        "source": ["\u2581A", "\u3053", "\u3093", "\u2581", "<unk>", "x", "</s>"],
        "source_text": text,
        "source_spans": spans,
        "target": ["<s>", "\u2581look", "ing"],
        "target_text": "looking",
        "target_spans": [None, [0, 4], [4, 7]],
    }
    run = named(cases.three_runs()[1], tokens, np.full((3, 7), 1 / 7))
    browser = opened([run], "#entmax/cross/0/0/0?row=2")
    assert browser.run("return document.querySelector('[data-side=source]').textContent") == text
    labels = browser.run("return [...document.querySelectorAll('.bar .token')].map((one) => one.textContent)")
    assert labels == ["\uff21", "\u3053", "\u3093", "\u2423", "\u2603", "x", "</s>"], (
        "no dots where there are no spaces"
    )
    assert browser.run("return document.querySelector('.word').textContent") == "\u00b7ing"


def test_spaces_of_a_character_model_are_seen(opened):
    tokens = {"source": ["\u2581", "a", "\u2581", "b"], "target": ["<s>", "c"]}
    browser = opened([named(cases.three_runs()[1], tokens, np.full((2, 4), 0.25))], "#entmax/cross/0/0/0")
    labels = browser.run("return [...document.querySelectorAll('.bar .token')].map((one) => one.textContent)")
    assert labels == ["\u2423", "a", "\u2423", "b"]


def test_two_runs_on_a_phone_are_near_each_other(opened):
    browser = opened(cases.three_runs(), "#entmax/cross/4/1/0?with=softmax", PHONE)
    tops = browser.run("return [...document.querySelectorAll('.stack')].map((one) => one.getBoundingClientRect().top)")
    assert len(tops) == 2
    assert tops[1] - tops[0] < 560
    assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]


def test_a_link_to_an_unknown_run_says_so(opened):
    browser = opened(cases.three_runs(), "")
    browser.run("location.hash = '#nobody/cross/4/1/0?with=ghost,entmax'")
    browser.until("return !document.getElementById('notice').hidden")
    assert browser.run("return document.getElementById('notice').textContent") == (
        "There is no run called nobody or ghost here, only softmax, entmax, rela."
    )
    browser.run("location.hash = '#rela/cross/4/1/0'")
    browser.until("return document.getElementById('notice').hidden")


def test_axes_have_several_ticks(browser):
    source = files("tamis.report").joinpath("assets", "numbers.js").read_text(encoding="utf-8")
    browser.open("about:blank")
    found = browser.run(
        f"{source}; const made = [];"
        "for (let k = 1; k < 400; k++) {"
        "  const [low, span] = [Math.sin(k) * 10 ** (k % 7 - 3), (1 + (k % 90) / 10) * 10 ** (k % 5 - 3)];"
        "  made.push([low, low + span, ticks(low, low + span, 4, { fewest: 3 })]);"
        "} return made"
    )
    assert {len(ticks) for *_, ticks in found} <= {3, 4, 5, 6, 7}
    for low, high, ticks in found:
        air = 1e-6 * (high - low)
        assert low - air <= ticks[0] < ticks[-1] <= high + air
    assert browser.run(f"{source}; return ticks(0, 2.1, 5, {{ least: 1 }})") == [0, 1, 2]  # no halves of steps


def test_a_row_waits_for_the_head_that_is_being_drawn(opened):
    """Weights take a moment to unpack: until then the page must not say that it shows what was asked for."""
    browser = opened(cases.three_runs(), "#softmax/cross/0/0/0")
    early = browser.run(
        "for (const name of ['layer', 'head']) document.querySelector(`[aria-label=${name}] [data-value='1']`).click();"
        "document.body.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowDown', bubbles: true }));"
        "return [location.hash, document.body.dataset.drawn]"
    )
    assert early[0].startswith("#softmax/cross/0/1/1?row=")
    assert early[1] == "#softmax/cross/0/0/0"
    browser.until("return document.body.dataset.drawn === location.hash")
    assert "layer 1, head 1" in browser.run("return document.querySelector('.panel').textContent")


def test_page_and_pictures_have_one_palette(opened):
    pytest.importorskip("matplotlib")
    from tamis.report.drawing import COLOURS, ramp
    from tamis.report.palette import palette

    browser = opened(cases.three_runs())
    colours = browser.run(
        "const style = getComputedStyle(document.documentElement);"
        "return [...Array(8).keys()].map((run) => style.getPropertyValue(`--run-${run}`).trim())"
    )
    assert tuple(colours) == COLOURS
    assert [round(255 * part) for part in ramp()[-1][:3]] == [
        int(palette()["light"]["ramp"][-1][place : place + 2], 16) for place in (1, 3, 5)
    ]


def test_a_text_that_is_too_large_offers_the_live_page(opened, monkeypatch):
    import sys

    monkeypatch.setattr(sys.modules["tamis.report.content"], "MOST_WEIGHTS", 100)
    browser = opened(cases.three_runs()[:1], "#softmax/cross/9/1/0")
    text = browser.run("return document.querySelector('.panel').textContent")
    assert re.search(r"has [\d,]+ weights that are not zero, too many for one file", text)
    assert "tamis explore softmax" in text


def test_long_maps_zoom_and_are_searched(opened):
    size = 1500
    weights = np.eye(size, dtype=np.float32)
    weights[700, 5] = 1.0
    run = named(cases.three_runs()[1], long_tokens(size), weights)
    browser = opened([run], "#entmax/cross/0/0/0?row=3")
    picture = "return document.querySelector('.stack canvas').toDataURL()"
    whole = browser.run(picture)
    browser.run("document.querySelector('[aria-label=\"zoom in\"]').click()")
    near = browser.run(picture)
    assert near != whole
    browser.run(
        "const find = document.querySelector('.finder input'); find.value = 's5';"
        " find.dispatchEvent(new Event('input'))"
    )
    hits = browser.run("return [...document.querySelectorAll('.found .hit')].map((one) => one.textContent)")
    assert hits == ["t5 100 %", "t700 50 %"]
    browser.run("document.querySelectorAll('.found .hit')[1].click()")
    browser.until("return location.hash.endsWith('row=700')")
    assert browser.run("return document.querySelector('.word').textContent") == "t700"
    browser.run("document.querySelector('.zoom button:nth-child(3)').click()")
    assert browser.run("return document.querySelector('.stack canvas').getContext('2d').canvas.width") < 1300


def test_a_language_model_has_its_scores_by_length(opened):
    rows = [
        {"mode": mode, "length": n, "perplexity": 9.0 - n / 1024} for n in (512, 1024) for mode in ("full", "sliding")
    ]
    keys = [{"length": n, "depth": depth, "accuracy": depth} for n in (512, 1024) for depth in (0.5, 1.0)]
    run = replace(cases.three_runs()[1], evaluation={"perplexity": rows, "passkeys": keys})
    browser = opened([run])
    titles = browser.run(
        "return [...document.querySelectorAll('#figure-lengths svg text')].map((one) => one.textContent)"
    )
    assert {"perplexity", "pass keys found", "512", "1024"} <= set(titles)
    assert content([run])["runs"][0]["lengths"] == {
        "perplexity": [[512, 8.5], [1024, 8.0]],
        "passkeys": [[512, 0.75], [1024, 0.75]],
    }


def test_a_task_has_its_scores_and_its_heads_their_spread_by_length(opened):
    scores = [{"length": n, "multiple": n / 8, "exact_match": 8 / n, "token_accuracy": 1.0} for n in (8, 16)]
    site = {"slopes": [1.0, 0.0, 0.0], "reach": [3, 9, 9], "horizon": [4, None, None]}
    grown = [
        {"keys": n, "sites": {"layers.0.self": {**site, "entropy": [0.1, 0.5, 0.7], "support": [2.0, n / 2, n]}}}
        for n in (10, 20)
    ]
    run = cases.three_runs()[1]
    run = replace(run, analysis={**run.analysis, "dispersion": grown}, evaluation={"scores": scores})
    found = content([run])["runs"][0]
    assert found["lengths"] == {"exact_match": [[8, 1.0], [16, 0.5]], "token_accuracy": [[8, 1.0], [16, 1.0]]}
    assert found["spread"]["entropy"] == {
        "without": [[10, pytest.approx(0.6)], [20, pytest.approx(0.6)]],
        "with": [[10, 0.1], [20, 0.1]],
    }
    assert found["spread"]["support"]["without"] == [[10, 7.5], [20, 15.0]]
    browser = opened([run])
    for figure, expected, lines in (
        ("lengths", {"exact match", "token accuracy", "length", "8", "16"}, 2),
        ("spread", {"entropy / log n", "keys with a weight", "tokens", "10", "20"}, 4),
    ):
        texts = f"return [...document.querySelectorAll('#figure-{figure} svg text')].map((one) => one.textContent)"
        assert expected <= set(browser.run(texts))
        drawn = f"return document.querySelectorAll('#figure-{figure} svg .mark').length"
        assert browser.run(drawn) == lines
    assert "Dashed" in browser.run("return document.querySelector('#figure-spread figcaption').textContent")


def test_everything_is_reached_by_keyboard(opened):
    browser = opened(cases.three_runs(), "#entmax/cross/4/1/0?row=1")
    seen = set()
    for _ in range(60):
        browser.press("\ue004")
        name, outline = browser.run(
            "const one = document.activeElement;"
            "return [one.getAttribute('aria-label') || one.textContent.slice(0, 40),"
            " getComputedStyle(one).outlineStyle]"
        )
        seen.add(name)
        if name and name != "A report":
            assert outline != "none" or len(name) > 39, f"{name} shows no focus"
    assert {
        "Overview",
        "Explorer",
        "light or dark",
        "help",
        "softmax",
        "cross",
        "Matrix",
        "sentence",
        "token after",
    } <= seen
    assert any("Who attends" in name for name in seen)


@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core here: see `make browser`")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("hash_", ["#overview", "#entmax/cross/4/1/0?with=rela", "#entmax/cross/4/1/0?view=links",
                                   "#entmax/cross/4/1/0?view=heads"])  # fmt: skip
def test_axe_finds_nothing(opened, hash_, dark):
    browser = opened(cases.three_runs(), hash_, dark=dark)
    assert violations(browser) == []


def violations(browser):
    """What axe finds wrong, in one line each."""
    browser.command("Page.enable", {})
    browser.command("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})
    found = browser.run("return JSON.stringify((await axe.run()).violations)")
    return [
        f"{one['id']}: {node['target'][0]}: {node.get('failureSummary', '')[:300]}"
        for one in json.loads(found)
        for node in one["nodes"][:3]
    ]
