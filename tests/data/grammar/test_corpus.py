"""What holds for every sentence that the grammar draws, and for the splits."""

import hashlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.data.grammar import SPLITS, Example, generate
from tamis.data.grammar.combinations import combinations
from tamis.data.grammar.corpus import reserved_for, split_of
from tamis.data.grammar.draws import Draws
from tamis.data.grammar.sampling import Sampler
from tamis.data.grammar.sentences import realise
from tamis.data.grammar.syntax import Clause, NounPhrase, Question, Relative, RelativePronoun
from tamis.data.grammar.words import ADJECTIVES, COMPOUNDS, NOUNS, VERBS

# Words without a counterpart: do-support and the "to" of an infinitive that German has without zu; the comma before a
# German clause, and the article in "der Hund des Mannes", which is "the man's dog".
UNLINKED_ENGLISH = {"do", "does", "did", "to"}
UNLINKED_GERMAN = {",", "der", "die", "das", "den", "dem"}
COMPOUND_WORDS = {form for noun in COMPOUNDS.values() for number in noun.german for form in number}


@pytest.fixture(scope="module")
def drawn() -> list[tuple[str | None, Example]]:
    """Fifty thousand sentences as they come, each with its split."""
    sampler = Sampler(Draws("fifty thousand"))
    trees = [sampler.sentence() for _ in range(50000)]
    return [(split_of(tree), realise(tree)) for tree in trees]


@pytest.fixture(scope="module")
def splits(drawn) -> dict[str, list[Example]]:
    return {split: [example for own, example in drawn if own == split] for split in SPLITS}


def draw(seed: int) -> Example:
    return realise(Sampler(Draws(str(seed))).sentence())


@given(st.integers())
@settings(max_examples=400, deadline=None)
def test_links_and_spans(seed):
    example = draw(seed)
    sources, targets = {source for source, _ in example.links}, {target for _, target in example.links}
    assert sources <= set(range(len(example.source)))
    assert targets <= set(range(len(example.target)))
    assert {example.source[i].lower() for i in set(range(len(example.source))) - sources} <= UNLINKED_ENGLISH
    assert {example.target[i].lower() for i in set(range(len(example.target))) - targets} <= UNLINKED_GERMAN
    for text, words, spans in (
        (example.source_text, example.source, example.source_spans),
        (example.target_text, example.target, example.target_spans),
    ):
        assert [text[start:end] for start, end in spans] == list(words)
        assert text.replace(" ", "") == "".join(words)
        assert text[0].isupper()
        assert text[-1] in ".?"
        for mark in ",.?":
            text = text.replace(mark, f" {mark}")
        assert text.split() == list(words)


@given(st.integers())
@settings(max_examples=200, deadline=None)
def test_final_marks_and_nouns_agree(seed):
    example = draw(seed)
    assert example.source[-1] == example.target[-1]
    assert (len(example.source) - 1, len(example.target) - 1) in example.links
    for source, target in example.links:
        noun = NOUNS.get(example.source[source])
        before = example.source[source - 1 : source + 1]
        if noun is not None and " ".join(before) not in COMPOUNDS and example.target[target] not in COMPOUND_WORDS:
            assert example.target[target] in noun.german[0]


def test_one_translation_per_source(drawn):
    translations: dict[tuple[str, ...], Example] = {}
    for _, example in drawn:
        assert translations.setdefault(example.source, example) == example


def test_same_everywhere():
    """Frozen: another machine, another Python or another process must give these very pairs."""
    text = "\n".join(f"{e.source_text}\t{e.target_text}\t{sorted(e.links)}" for e in generate(300, "valid", seed=7))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "d57f0cdd945b94aa"


def test_prefix_and_seeds():
    assert generate(50) == generate(80)[:50]
    assert generate(0) == []
    assert generate(50, seed=1) != generate(50, seed=2)
    assert generate(50, "valid") != generate(50, "test")


def test_generate_gives_different_sentences_of_its_split():
    for split in SPLITS:
        sources = [example.source_text for example in generate(500, split, seed=5)]
        assert len(set(sources)) == len(sources)


def test_no_source_in_two_splits(splits):
    sources = {split: {example.source_text for example in examples} for split, examples in splits.items()}
    assert not sources["train"] & sources["valid"]
    assert not sources["train"] & sources["test"]
    assert not sources["valid"] & sources["test"]


def test_shares(drawn, splits):
    """Neither valid nor test takes long to find, and train is most of what there is."""
    shares = {split: len(examples) / len(drawn) for split, examples in splits.items()}
    assert shares["train"] > 0.6
    assert shares["valid"] > 0.08
    assert shares["test"] > 0.08


def test_train_holds_every_english_word(splits):
    known = {word.lower() for example in splits["train"] for word in example.source}
    for split in ("valid", "test"):
        assert {word.lower() for example in splits[split] for word in example.source} <= known


def test_train_holds_nearly_every_german_form(splits):
    """But for compounds; what else is new is a rare form of a known verb."""
    known = {word.lower() for example in splits["train"] for word in example.target}
    for split in ("valid", "test"):
        words = [word.lower() for example in splits[split] for word in example.target if word not in COMPOUND_WORDS]
        assert sum(word not in known for word in words) < 0.001 * len(words)


def test_some_compounds_are_never_in_train(splits):
    """Their parts are: the model has to put them together."""
    known = {word for example in splits["train"] for word in example.target}
    for split in ("valid", "test"):
        words = {word for example in splits[split] for word in example.target}
        nouns = [noun for noun in COMPOUNDS.values() if reserved_for("compound", noun.modifier, noun.singular) == split]
        assert nouns
        for noun in nouns:
            assert noun.german[0][0] in words
            assert not known.intersection(*noun.german)
            assert NOUNS[noun.singular].german[0][0] in known


def test_combinations():
    """Of: Which old man who sleeps sees my kitchen lamp?"""
    man, lamp = NOUNS["man"], NOUNS["kitchen lamp"]
    see, sleep = (next(verb for verb in VERBS if verb.lemma == lemma) for lemma in ("see", "sleep"))
    relative = Relative(Clause(RelativePronoun(man, False), sleep, sleep.frames[0]))
    subject = NounPhrase(man, "which", adjectives=(ADJECTIVES["old"],), relative=relative)
    tree = Question(Clause(subject, see, see.frames[0], NounPhrase(lamp, "my")), gap="subject")
    assert sorted(combinations(tree)) == [
        ("adjective", "old", "man"),
        ("compound", "kitchen", "lamp"),
        ("construction", "question", "man"),
        ("construction", "relative", "man"),
        ("object", "see", "kitchen lamp"),
        ("subject", "see", "man"),
        ("subject", "sleep", "man"),
    ]


def test_size(splits):
    train = splits["train"]
    lengths = [len(example.target) for example in train]
    assert 8 <= sum(lengths) / len(lengths) <= 11
    assert sum(3 <= length <= 18 for length in lengths) / len(lengths) > 0.95
    assert len({word.lower() for example in train for word in example.source}) < 900


def test_fast_enough():
    start = time.process_time()
    generate(2000, seed=3)
    assert time.process_time() - start < 2.0  # 0.3 s on one core


@pytest.mark.parametrize("split", ["dev", "", None])
def test_unknown_split(split):
    with pytest.raises(ValueError, match="split must be one of train, valid, test"):
        generate(1, split)


@pytest.mark.parametrize(
    ("count", "seed", "message"), [(-1, 0, "count"), (1.5, 0, "count"), (True, 0, "count"), (1, "a", "seed")]
)
def test_bad_numbers(count, seed, message):
    with pytest.raises(ValueError, match=f"{message} must be an int"):
        generate(count, seed=seed)
