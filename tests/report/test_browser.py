"""The report in a real browser: it opens alone, draws everything, shows the right numbers, and text stays text."""

import re
import time
from dataclasses import replace

import numpy as np
import pytest

from analysis.cases import batches, seq2seq
from report import cases
from report.browser import MISSING, browsing
from tamis.report import content, page, show

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

DESKTOP, PHONE = (1280, 900), (390, 800)
LEFT, UP, RIGHT, DOWN = "\ue012", "\ue013", "\ue014", "\ue015"


@pytest.fixture(scope="module")
def browser():
    with browsing() as window:
        window.screen(*DESKTOP)
        yield window


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page(content(cases.three_runs(), "Three <runs>")), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def at(browser, address):
    """Opens the report at a place, anew, and waits until it is drawn.  At the end nothing must have gone wrong."""

    def go(hash_, size=DESKTOP, dark=False):
        browser.open("about:blank")
        browser.screen(*size, dark=dark)
        browser.requests()
        browser.open(address + hash_)
        browser.until("return document.body.dataset.ready")
        if hash_ not in ("", "#overview"):
            drawn(browser)
        return browser

    yield go
    assert browser.complaints() == []


def drawn(browser):
    """Waits until what the address says is on the screen; returns what it says."""
    return browser.until("return location.hash === document.body.dataset.drawn && location.hash")


def best_of_three(act):
    """Seconds that something takes when nothing else is in its way."""
    times = []
    for _ in range(3):
        began = time.monotonic()
        act()
        times.append(time.monotonic() - began)
    return min(times)


def shown_row(browser, panel=0):
    """The tokens and weights of the list beside a matrix."""
    rows = browser.run(
        "return [...document.querySelectorAll('.panel')[args[0]].querySelectorAll('.bar')]"
        ".map((bar) => [bar.querySelector('.token').textContent, bar.querySelector('.weight').textContent])",
        panel,
    )
    return [token for token, _ in rows], [weight for _, weight in rows]


def shown_token(browser):
    """The number of the token that is looked at, from 0."""
    text = browser.run("return document.querySelector('.step').textContent")
    return int(re.search(r"token ([0-9,]+) of", text)[1].replace(",", "")) - 1


def assert_weights(texts, expected):
    assert len(texts) == len(expected)
    for text, weight in zip(texts, expected, strict=True):
        assert (text == "0") == (weight == 0.0)
        assert float(text) == pytest.approx(weight, rel=6e-3)


def test_it_opens_quickly_and_alone(at, address):
    assert best_of_three(lambda: at("")) < 2.0
    browser = at("")
    assert browser.requests() == [address]
    assert browser.run("return document.title") == "Three <runs>"
    assert browser.run("return location.hash") == "#overview"


def test_the_network_is_forbidden(at):
    browser = at("")
    ask = "try { await fetch('http://127.0.0.1:9/'); return 'sent' } catch (error) { return String(error) }"
    assert "TypeError" in browser.run(ask)
    assert all("Content Security Policy" in text for text in browser.complaints())


def test_every_figure_draws_and_says_what_it_is(at):
    browser = at("#overview")
    found = browser.run(
        "return [...document.querySelectorAll('#part-overview figure')].map((figure) => ({"
        " name: figure.id, caption: figure.querySelector('figcaption').textContent,"
        " marks: figure.querySelectorAll('svg .mark').length, rows: figure.querySelectorAll('tbody tr').length }))"
    )
    assert {figure["name"].removeprefix("figure-") for figure in found} == {
        "runs", "training", "alpha-trajectories-entmax", "alpha-histograms", "density-histograms", "head-density",
        "layer-density", "support-by-length", "null-share", "diversity", "positions", "alignment", "head-importance",
        "named-heads", "every-head",
    }  # fmt: skip
    for figure in found:
        assert len(figure["caption"]) > 20
        assert figure["marks"] or figure["rows"] or figure["name"] == "figure-named-heads", figure["name"]
    heads = sum(len(site["density"]) for run in cases.three_runs() for site in run.analysis["sites"].values())
    assert browser.run("return document.querySelectorAll('#figure-head-density circle.mark').length") == heads


def test_the_table_has_the_scores(at):
    browser = at("#overview")
    cells = "return [...document.querySelectorAll('.runs tbody tr')].map((row) => row.textContent)"
    rows = browser.run(cells)
    assert all(text in row for row in rows for text in ("30.1 \u00b11.0", "55.5 \u00b10.5", "40.0 \u00b15.0"))
    assert browser.run("return document.querySelectorAll('.runs .best').length") == 0  # all have the same


@pytest.mark.parametrize(("score", "marked"), [(32.5, ["32.5 \u00b10.4"]), (31.3, [])])
def test_bold_is_what_is_ahead_by_more_than_the_intervals(browser, tmp_path, score, marked):
    first, *others = cases.three_runs()
    bleu = {"score": score, "low": score - 0.4, "high": score + 0.4}  # the others have 29 to 31
    translation = {**first.evaluation["translation"], "bleu": bleu}
    first = replace(first, evaluation={**first.evaluation, "translation": translation})
    path = tmp_path / "report.html"
    path.write_text(page(content([first, *others], "Ahead")), encoding="utf-8")
    browser.open(path.as_uri())
    browser.until("return document.body.dataset.ready")
    found = "return [...document.querySelectorAll('.runs .best')].map((cell) => cell.textContent)"
    assert browser.run(found) == marked


def saved(browser, links):
    """Types, sizes and texts of what some links save, the last of them a PNG."""
    return browser.run(
        """
        const blobs = [];
        const make = URL.createObjectURL;
        URL.createObjectURL = (blob) => (blobs.push(blob), make(blob));
        HTMLAnchorElement.prototype.click = () => {};
        for (const link of document.querySelectorAll(args[0])) link.click();
        while (!blobs.some((blob) => blob.type === 'image/png')) await new Promise((done) => setTimeout(done, 20));
        return Promise.all(blobs.map(async (blob) => [blob.type.split(';')[0], blob.size, await blob.text()]));
        """,
        links,
    )


@pytest.mark.parametrize("view", ["matrix", "links"])
def test_a_head_can_be_saved(at, view):
    browser = at(f"#entmax/encoder/3/1/2?view={view}")
    (_, _, text), (_, size, _) = saved(browser, ".panel .links button")
    head, *rows = text.rstrip().split("\r\n")
    assert head == "query,query token,key,key token,weight"
    assert len(rows) == np.count_nonzero(cases.dense(cases.three_runs()[1], 3, "encoder.1.self")[2])
    assert size > 3000


def test_numbers_and_pictures_can_be_saved(at):
    found = saved(at("#overview"), "#figure-head-density .links button")
    texts = {kind: text for kind, _, text in found}
    first, *rows = texts["text/csv"].split("\r\n")
    assert first == "run,attention,layer,head,head-density"
    density = cases.three_runs()[1].analysis["sites"]["encoder.1.self"]["density"][2]
    assert f"entmax,encoder,1,2,{density}" in rows
    assert texts["image/svg+xml"].startswith("<svg")
    assert next(size for kind, size, _ in found if kind == "image/png") > 5000


@pytest.mark.parametrize("run", [0, 1, 2])
@pytest.mark.parametrize(("kind", "site"), [("encoder", "encoder.1.self"), ("cross", "decoder.1.cross")])
def test_picking_a_head_shows_its_numbers(at, run, kind, site):
    name = list(cases.MECHANISMS)[run]
    browser = at(f"#{name}/{kind}/3/1/0?row=2")
    weights = cases.dense(cases.three_runs()[run], 3, site)
    pictures = set()
    for head in range(4):
        browser.run("document.querySelector(`[aria-label=head] [data-value='${args[0]}']`).click()", head)
        drawn(browser)
        tokens, texts = shown_row(browser)
        assert tokens == [f"s{place}" for place in range(weights.shape[2])]
        assert_weights(texts, weights[head, 2])
        pictures.add(browser.run("return document.querySelector('.stack canvas').toDataURL()"))
    assert len(pictures) == 4


def cells(browser):
    """What the page says under the pointer, and the colour of the canvas there, at places all over the matrix."""
    box = browser.run("return document.querySelector('.over').getBoundingClientRect().toJSON()")
    width, height = box["width"] - 60, box["height"] - 60
    places = [(round(box["left"] + 50 + 71 * k % width), round(box["top"] + 50 + 43 * k % height)) for k in range(40)]
    said = []
    for x, y in places:
        browser.point(x, y)
        said.append(
            browser.run("const { hidden, innerText } = document.getElementById('tip'); return hidden ? '' : innerText")
        )
    colours = browser.run(
        "const canvas = document.querySelector('.stack canvas'); const box = canvas.getBoundingClientRect();"
        "const { data, width } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
        "return args[0].map(([x, y]) => 4 * ((Math.round(y - box.top)) * width + Math.round(x - box.left)))"
        ".map((at) => [...data.slice(at, at + 3)])",
        places,
    )
    return [(lines.split("\n"), colour) for lines, colour in zip(said, colours, strict=True) if lines]


@pytest.mark.parametrize(("run", "head"), [(1, 0), (2, 2)])
def test_cells_say_their_weight_and_zeros_are_empty(at, run, head):
    browser = at(f"#{list(cases.MECHANISMS)[run]}/cross/9/0/{head}")
    weights = cases.dense(cases.three_runs()[run], 9, "decoder.0.cross")[head]
    zeros = kept = 0
    for (title, text, *share), colour in cells(browser):
        query, key = (int(token.strip()[1:]) for token in title.split("\u2192"))
        empty = min(colour) >= 246  # lighter than the lightest weight
        if weights[query, key] == 0.0:
            assert text == "exactly 0"
            assert empty
            zeros += 1
        else:
            assert float(text.removeprefix("weight ")) == pytest.approx(weights[query, key], rel=6e-3)
            assert bool(share) == (run == 2)  # rows of ReLA do not sum to one
            kept += not empty
    assert zeros > 0
    assert kept > 0


@pytest.mark.parametrize("view", ["matrix", "links", "heads"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_view_draws_at_every_size(at, view, size):
    browser = at(f"#entmax/decoder/5/1/2?view={view}&with=rela", size)
    panels = browser.run("return [...document.querySelectorAll('.panel')].map((panel) => panel.dataset.run)")
    assert panels == ["1", "2"]
    colours = browser.run(
        "return [...document.querySelectorAll('.panel canvas:not(.over)')].map((canvas) => {"
        " const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
        " return new Set(new Uint32Array(data.buffer)).size })"
    )
    assert len(colours) == (16 if view == "heads" else 2)
    assert min(colours) > 2
    assert browser.run("return document.documentElement.scrollWidth") <= size[0]


def test_the_overview_fits_a_phone(at):
    browser = at("#overview", PHONE)
    assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]
    assert browser.run("return document.querySelectorAll('#part-overview svg .mark').length") > 100


def test_a_small_head_opens_large(at):
    browser = at("#entmax/encoder/5/0/0?view=heads")
    browser.run('document.querySelector(\'.small[data-layer="1"][data-head="3"]\').click()')
    assert drawn(browser) == "#entmax/encoder/5/1/3"


def test_two_runs_are_compared_on_the_same_sentence(at):
    browser = at("#entmax/cross/4/1/0?with=softmax&row=1")
    for panel, run in enumerate((1, 0)):
        expected = cases.dense(cases.three_runs()[run], 4, "decoder.1.cross")[0, 1]
        assert_weights(shown_row(browser, panel)[1], expected)


def test_deep_links_open_the_same_view(at):
    browser = at("#entmax/cross/4/1/3?view=links&with=rela&row=2")
    pressed = "return [...document.querySelectorAll('[aria-pressed=true]')].map((button) => button.dataset.value)"
    assert browser.run(pressed)[:6] == ["1", "2", "cross", "1", "3", "links"]
    for wrong in ("#nobody/x/99/99/-1?row=x", "#entmax", "#%E0%A4%A/cross/1e9", "#entmax/cross/0/0/0?with=entmax"):
        browser.run("location.hash = args[0]", wrong)
        drawn(browser)


def test_keys_move_and_do_not_fill_the_history(at):
    browser = at("#softmax/encoder/3/0/0")
    before = browser.run("return history.length")
    row = shown_token(browser)
    steps = [
        (RIGHT, "#softmax/encoder/3/0/1"), (LEFT, "#softmax/encoder/3/0/0"), ("]", "#softmax/encoder/3/1/0"),
        ("[", "#softmax/encoder/3/0/0"), (DOWN, "#softmax/encoder/3/0/0?row={}"), (UP, "#softmax/encoder/3/0/0?row={}"),
        ("n", "#softmax/encoder/4/0/0"), ("p", "#softmax/encoder/3/0/0"), ("t", "#softmax/decoder/3/0/0"),
        ("v", "#softmax/decoder/3/0/0?view=links"), ("v", "#softmax/decoder/3/0/0?view=heads"),
        ("v", "#softmax/decoder/3/0/0"), ("r", "#entmax/decoder/3/0/0"), ("c", "#entmax/decoder/3/0/0?with=softmax"),
    ]  # fmt: skip
    for key, expected in steps:
        browser.press(key)
        assert drawn(browser) == expected.format(row + 1 if key == DOWN else row), key
    assert browser.run("return history.length") == before
    browser.press("?")
    assert browser.run("return document.getElementById('help').open")
    browser.press("?")
    browser.press("o")
    browser.until("return location.hash === '#overview' && !document.getElementById('part-overview').hidden")
    browser.press("e")
    assert drawn(browser) == "#entmax/decoder/3/0/0?with=softmax"


def test_light_and_dark(at):
    name = "return document.documentElement.dataset.theme"
    browser = at("#entmax/cross/3/0/0", dark=True)
    assert browser.run(name) == "dark"
    picture = "return document.querySelector('.stack canvas').toDataURL()"
    dark = browser.run(picture)
    browser.press("d")
    assert browser.run(name) == "light"
    browser.until(f"return {picture.removeprefix('return ')} !== args[0]", dark)
    browser.run("localStorage.clear()")


def test_hostile_sentences_stay_text(at):
    browser = at("#entmax/cross/0/0/0?row=2")
    source, target = cases.HOSTILE
    shown = browser.run("return [...document.querySelectorAll('#sentence p')].map((line) => line.textContent)")
    assert shown[0] == "".join(source[:-1]).replace("\u2581", " ").strip()
    tokens, _ = shown_row(browser)
    assert tokens == [token.removeprefix("\u2581") for token in source]
    assert browser.run("return document.querySelector('.word').textContent") == target[2].removeprefix("\u2581")
    options = browser.run("return document.querySelector('select[aria-label=sentence]').options[0].textContent")
    assert "<script>window.harm=1</script>" in options
    assert browser.run("return window.harm ?? null") is None
    assert browser.run("return document.querySelectorAll('img, iframe').length") == 0
    for view in ("links", "heads"):
        browser.run("location.hash = args[0]", f"#entmax/cross/0/0/0?view={view}")
        drawn(browser)


def test_long_sentences_stay_fluent(browser, tmp_path):
    path = tmp_path / "long.html"
    path.write_text(page(content([cases.long_run()])), encoding="utf-8")
    browser.screen(*DESKTOP)
    browser.open(path.as_uri() + "#long/cross/0/0/0")
    drawn(browser)

    def press(key):
        browser.press(key)
        drawn(browser)
        browser.run("await new Promise(requestAnimationFrame)")

    for view, limit in (("matrix", 0.5), ("links", 1.0)):
        assert best_of_three(lambda: press(RIGHT)) < limit, view
        assert best_of_three(lambda: press(DOWN)) < 0.25, view
        press("v")
    assert browser.complaints() == []


def test_a_notebook_shows_the_explorer(browser, tmp_path):
    path = tmp_path / "notebook.html"
    frame = show(seq2seq(), batches(4))._repr_html_()
    path.write_text(f"<!doctype html><body>{frame}</body>", encoding="utf-8")
    browser.open(path.as_uri())
    browser.enter_frame(0)
    browser.until("return document.body.dataset.drawn")
    assert browser.run("return document.getElementById('tabs').children.length") == 0
    browser.run("document.querySelector('[aria-label=head] [data-value=\"1\"]').click()")
    browser.until("return document.querySelector('.panel h2').textContent.endsWith('head 1')")
    assert browser.complaints() == []


def overview_of(browser, tmp_path, runs):
    path = tmp_path / "report.html"
    path.write_text(page(content(runs)), encoding="utf-8")
    browser.open("about:blank")
    browser.open(path.as_uri())
    browser.until("return document.body.dataset.ready")
    return browser


def test_only_roles_that_a_head_has_are_rows_and_others_say_why_not(browser, tmp_path):
    """No word asks in the first, nobody said which words there are in the second."""
    silent, unknown, _ = cases.three_runs()
    missing = {"questions": 0, "split_words": 0, "interrogation": None, "split_word_merging": None}
    sites = {site: {**found, **missing} for site, found in silent.analysis["sites"].items()}
    silent = replace(silent, analysis={**silent.analysis, "sites": sites})
    overview_of(browser, tmp_path, [silent, unknown])
    rows = browser.run(
        "return [...document.querySelectorAll('table.named tbody tr')].map((row) => row.querySelectorAll('a').length)"
    )
    assert all(rows), "no row is of near misses alone"
    text = browser.run("return document.querySelector('.nobody').textContent")
    assert "interrogation (no question in the data)" in text
    assert "subword merging (no word is split in the data)" in text
    assert browser.complaints() == []


def test_keys_that_no_row_sees_have_no_dot(at):
    browser = at("#overview")
    dots = browser.run("return document.querySelectorAll('#figure-positions circle.mark').length")
    sites = [site for run in cases.three_runs() for site in run.analysis["sites"].values()]
    weights = [x for site in sites if site["kind"] != "cross" for head in site["confidence"] for x in head]
    assert dots == sum(weight is not None for weight in weights)
    assert 0 < sum(weight is None for weight in weights) == 3 * 2 * 4 * 3, "three distances of a causal head"


def test_legends_show_what_is_drawn(at):
    browser = at("#overview")
    for name, shape in (("head-density", "circle"), ("positions", "circle"), ("diversity", "line")):
        assert browser.run(f"return document.querySelectorAll('#figure-{name} .legend {shape}').length") == 3
