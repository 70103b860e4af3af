"""The live page in a real browser: type, pick heads, compare, silence a head, edit, ten clients, hostile text."""

import itertools
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason="the live page needs pip install 'tamis[explore]'")
pytest.importorskip("uvicorn", reason="the live page needs pip install 'tamis[explore]'")

from report.browser import MISSING, browsing
from report.live.models import generator, subjects, translator
from report.live.test_server import asked
from report.test_page import AXE, violations
from tamis.report import explore
from tamis.report.live.looking import Limits, Wish, look, score_of
from tamis.report.live.server import Bounds, LiveServer, application

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

TEXT = "the old man reads"


@pytest.fixture(scope="module")
def browser():
    with browsing() as window:
        yield window


@pytest.fixture(scope="module")
def address():
    with LiveServer(application(subjects(), Limits(tokens=300, written=10), title="Live")) as server:
        yield server.address


@pytest.fixture
def live(browser, address):
    """The page, opened anew; at the end nothing must have gone wrong, but for what a test expects."""

    def go(hash_="", size=(1280, 1000), dark=False):
        browser.open("about:blank")
        browser.screen(*size, dark=dark)
        browser.requests()
        browser.complaints()
        browser.open(address + hash_)
        browser.until("return document.body.dataset.ready")
        return browser

    yield go
    assert browser.complaints() == []


def typed(browser, text, panels=1):
    """Types a text, asks, and waits for the answers."""
    browser.run(
        "const box = document.getElementById('text'); box.value = args[0];"
        " document.body.dataset.drawn = ''; document.getElementById('ask').click()",
        text,
    )
    browser.until(f"return document.querySelectorAll('.panel').length === {panels} && {SAID} === ''")
    browser.until("return document.body.dataset.drawn === location.hash")


SAID = "[...document.querySelectorAll('.said')].map((one) => one.textContent).join('')"
ANSWERS = "return [...document.querySelectorAll('.answer')].map((one) => one.value)"


def test_a_sentence_is_typed_and_its_heads_are_shown(live, address):
    browser = live()
    for character in TEXT[:3]:
        browser.run("document.getElementById('text').focus()")
        browser.press(character)
    browser.until("return document.querySelectorAll('.panel').length === 1", seconds=20)
    typed(browser, TEXT)
    found = look(subjects()[0], Wish(text=TEXT), Limits(written=10))
    assert browser.run(ANSWERS) == [found.answer]
    assert f"{score_of(found.forced):.2f}".replace("-", "\u2212") in browser.run(
        "return document.querySelector('.score').textContent"
    )
    assert browser.run("return document.querySelector('[data-side=source]').textContent") == TEXT
    assert browser.run("return document.querySelectorAll('.alignment .word').length") > 4
    weights = found.weights["decoder.1.cross"].to_dense()[0, 2]
    browser.run("document.querySelector('[aria-label=layer] [data-value=\"1\"]').click()")
    browser.run("document.querySelector('[aria-label=head] [data-value=\"2\"]').click()")
    browser.run("location.hash = '#entmax/cross/0/1/2?row=1'")
    browser.until("return document.body.dataset.drawn === '#entmax/cross/0/1/2?row=1'")
    shown = browser.run("return [...document.querySelectorAll('.bar .weight')].map((one) => one.textContent)")
    assert [float(text) for text in shown] == pytest.approx(weights[1].tolist(), rel=6e-3)
    assert all(asked.startswith(address) for asked in browser.requests())


def test_words_of_an_alignment_stand_apart(live):
    browser = live()
    typed(browser, TEXT)
    boxes = browser.run(
        "return [...document.querySelectorAll('.alignment .word')].map((word) => {"
        " const box = word.getBBox(); return [Math.round(box.y), box.x, box.x + box.width] })"
    )
    lines = {y: sorted(box[1:] for box in boxes if box[0] == y) for y, *_ in boxes}
    assert len(lines) == 2
    for line in lines.values():
        assert all(after[0] - before[1] > 8 for before, after in itertools.pairwise(line))


def test_the_box_says_what_the_model_does_with_a_text(live):
    browser = live()
    said = "return [document.getElementById('ask').textContent, document.getElementById('text').placeholder]"
    assert browser.run(said) == ["Translate", "Type a sentence to translate"]
    browser.run("location.hash = '#text/decoder/0/0/0'")
    browser.until("return document.getElementById('ask').textContent === 'Continue'")
    assert browser.run(said) == ["Continue", "Type a text"]


def test_models_stand_side_by_side(live):
    browser = live("#entmax/cross/0/0/0?with=rela,text")
    typed(browser, TEXT, panels=2)
    answers = browser.run(ANSWERS)
    expected = [look(subject, Wish(text=TEXT), Limits(written=10)).answer for subject in subjects()[:2]]
    assert answers[:2] == expected
    names = browser.run("return [...document.querySelectorAll('.panel')].map((one) => one.dataset.run)")
    assert names == ["0", "1"], "a language model has no cross-attention to stand beside them"


def test_an_answer_is_edited_by_hand(live):
    browser = live()
    typed(browser, TEXT)
    browser.run(
        "const box = document.querySelector('.answer'); box.focus(); box.value = 'der Mann';"
        " box.dispatchEvent(new Event('input'))"
    )
    browser.until("return document.querySelector('[data-side=target]').textContent === 'der Mann'")
    found = look(subjects()[0], Wish(text=TEXT, answer="der Mann"), Limits(written=10))
    text = browser.run("return document.querySelector('.score').textContent")
    assert f"{score_of(found.forced):.2f}".replace("-", "\u2212") in text
    assert f"by itself it writes: {found.own}" in text
    browser.run(
        "[...document.querySelectorAll('.card button')].find((one) => one.textContent === 'its own answer').click()"
    )
    browser.until("return document.querySelector('.answer').value === args[0]", found.own)


def test_a_head_is_silenced_and_an_alpha_moved(live):
    browser = live("#entmax/cross/0/0/1")
    typed(browser, TEXT)
    browser.run("document.getElementById('silence').click()")
    browser.until("return document.querySelector('.changed')")
    found = look(subjects()[0], Wish(text=TEXT, silent=(("decoder.0.cross", 1),)), Limits(written=10))
    assert browser.run(ANSWERS) == [found.answer]
    before = f"({found.before['score']:.2f} before)".replace("-", "\u2212")
    assert before in browser.run("return document.querySelector('.changed').textContent")
    browser.run("document.getElementById('silence').click()")
    browser.until("return !document.querySelector('.changed')")
    browser.run(
        "const slider = document.getElementById('alpha'); slider.value = 2;"
        " slider.dispatchEvent(new Event('input')); slider.dispatchEvent(new Event('change'))"
    )
    browser.until("return document.querySelector('.changed')")
    assert "decoder.0.cross head 1 alpha 2.00" in browser.run("return document.getElementById('changes').textContent")
    moved = look(subjects()[0], Wish(text=TEXT, alphas={"decoder.0.cross": {1: 2.0}}), Limits(written=10))
    assert browser.run(ANSWERS) == [moved.answer]
    browser.run("location.hash = '#rela/cross/0/0/0'")
    browser.until("return document.getElementById('changes').textContent.includes('no alpha')")


def test_a_language_model_continues(live):
    browser = live("#text/decoder/0/0/0")
    typed(browser, TEXT)
    found = look(subjects()[2], Wish(text=TEXT), Limits(written=10))
    assert browser.run(ANSWERS) == [found.answer]
    assert browser.run("return document.querySelector('[data-side=target]').textContent") == TEXT + found.answer


@pytest.mark.parametrize(
    "text",
    ["<img src=x onerror=window.harm=1>", "</script><script>window.harm=1</script>",
     "\u05e9\u05dc\u05d5\u05dd \u202eabc\u202c x",
     "\U0001f469\u200d\U0001f680\U0001f1e9\U0001f1ea", "a\u2028b \ufeff\u200b c",
     "${1} {{content}} \\u003c"],
)  # fmt: skip
def test_hostile_text_is_shown_as_it_was_typed(live, text):
    browser = live()
    typed(browser, text)
    assert browser.run("return document.querySelector('[data-side=source]').textContent") == text
    assert browser.run("return window.harm ?? null") is None
    assert browser.run("return document.querySelectorAll('img, iframe').length") == 0


def test_what_is_refused_says_why(live, browser):
    live()
    for text, message in (("a\0b", "NUL"), ("word " * 400, "may have 300 tokens"), ("x" * 1_000_000, "bytes")):
        browser.run("document.getElementById('text').value = args[0]; document.getElementById('ask').click()", text)
        browser.until(f"return {SAID}.includes(args[0])", message)
    assert all("status of 4" in complaint for complaint in browser.complaints())
    typed(browser, TEXT)


def test_another_page_cannot_ask(browser, address):
    """From a page of another origin, such as a file: the browser sends its Origin, and is refused."""
    browser.open("about:blank")
    found = browser.run(
        "const ask = (mode) => fetch(args[0] + 'api/look', { method: 'POST', mode, body: '{}',"
        " headers: { 'Content-Type': 'text/plain' } }).then((answer) => answer.type, (error) => 'refused');"
        "return [await ask('cors'), await ask('no-cors')]",
        address,
    )
    assert found[0] == "refused"
    frame = "const one = document.createElement('iframe'); one.src = args[0]; document.body.append(one);"
    browser.run(frame + " await new Promise((done) => { one.onload = done; setTimeout(done, 2000) })", address)
    browser.enter_frame(0)
    assert browser.run("return document.getElementById('live') === null"), "it is in no frame of others"
    browser.complaints()


def test_ten_clients_type_at_once(live, address):
    server = SimpleNamespace(address=address)
    stop = threading.Event()
    failed = []

    def type_on(number):
        word = 0
        while not stop.is_set():
            word += 1
            status, body, _ = asked(server, body={"run": number % 3, "text": "the old man " + "reads " * (word % 9)})
            if status not in (200, 429, 503):
                failed.append((status, body))

    threads = [threading.Thread(target=type_on, args=(number,)) for number in range(9)]
    for thread in threads:
        thread.start()
    try:
        browser = live()
        browser.run("document.getElementById('text').value = args[0]; document.getElementById('ask').click()", TEXT)
        browser.until("return document.querySelectorAll('.panel').length === 1", seconds=40)
        assert browser.run(ANSWERS) == [look(subjects()[0], Wish(text=TEXT), Limits(written=10)).answer]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failed == []
    browser.complaints()  # a busy server may have asked to try again


@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core here: see `make browser`")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_on_the_live_page(live, dark):
    browser = live("#entmax/cross/0/0/0?with=rela", dark=dark)
    typed(browser, TEXT, panels=2)
    browser.run("document.getElementById('silence').click()")
    browser.until("return document.querySelector('.changed')")
    assert violations(browser) == []


def test_it_fits_a_phone(live):
    browser = live("#entmax/cross/0/0/0?with=rela", size=(390, 800))
    typed(browser, TEXT, panels=2)
    assert browser.run("return document.documentElement.scrollWidth") <= 390


def test_a_notebook_opens_it(browser):
    with explore({"one": translator(), "two": generator()}) as page:
        assert page.address in page._repr_html_()
        browser.open(page.address)
        browser.until("return document.body.dataset.ready")
        typed(browser, "a small dog")
        assert len(browser.run(ANSWERS)) == 1


def test_weights_that_are_gone_are_said_to_be(browser):
    bounds = Bounds(kept_bytes=1)
    with LiveServer(application(subjects()[:1], bounds=bounds), bounds=bounds) as server:
        browser.open(server.address)
        browser.until("return document.body.dataset.ready")
        typed(browser, TEXT)
        body = {"run": 0, "text": "another reader"}
        assert asked(server, body=body)[0] == 200
        browser.run("document.querySelector('[aria-label=attention] [data-value=\"encoder\"]').click()")
        browser.until(f"return {SAID}.includes('these weights are gone: ask again')")
        typed(browser, TEXT)
    assert all("410" in complaint for complaint in browser.complaints())
