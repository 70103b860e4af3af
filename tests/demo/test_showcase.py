"""The sentences that documents and the demo offer for translation are ones that the demo's models know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tamis.data.grammar import generate
from tamis.decoding import Translator
from tamis.demo.translation import ARMS, RECIPE, SHOWCASE
from tamis.experiments import read_recipe, train

ROOT = Path(__file__).parents[2]
TRANSLATIONS = {SHOWCASE: "Der alte Mann liest eine Zeitung.", "The cat sleeps.": "Die Katze schläft."}
OFFERED = re.compile(r"echo '([^']+)' \| tamis translate|(?:translator|generator)(?:\.\w+)?\(\[\"([^\"]+)\"\]")
WORDS = re.compile(r"\w+'s|\w+|[^\w\s]")
SHOWN = re.compile(r"^\| ([^|]+[.?]) \| ([^|]+[.?]) \|$", re.MULTILINE)


def offered() -> set[str]:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    return {SHOWCASE, *(first or second for text in texts for first, second in OFFERED.findall(text))}


def test_every_word_of_them_is_in_the_grammar():
    examples = generate(20_000)
    english = {word for example in examples for word in example.source}
    german = {word for example in examples for word in example.target}
    assert len(OFFERED.findall((ROOT / "README.md").read_text(encoding="utf-8"))) >= 1
    for sentence in offered():
        assert set(WORDS.findall(sentence)) <= english, sentence
    assert TRANSLATIONS.keys() == {text for text in offered() if text.endswith(".")}  # others are for texts to go on
    for sentence in TRANSLATIONS.values():
        assert set(WORDS.findall(sentence)) <= german, sentence
    shown = SHOWN.findall((ROOT / "docs" / "grammar.md").read_text(encoding="utf-8").replace("**", ""))
    assert len(shown) >= 10
    for source, target in shown:
        assert set(WORDS.findall(source)) <= english, source
        assert set(WORDS.findall(target)) <= german, target


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_the_models_of_the_demo_translate_them_right(arm: str, tmp_path: Path):
    recipe = read_recipe(RECIPE, [f'data.folder="{tmp_path}/data"'], arm)
    train(recipe, tmp_path / "run", "cpu")
    assert Translator.load(tmp_path / "run", "cpu")(list(TRANSLATIONS)) == list(TRANSLATIONS.values())
