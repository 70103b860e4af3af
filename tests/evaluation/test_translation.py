"""Scores, intervals and p-values are sacreBLEU's; runs are pooled as defined."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from tamis.evaluation import compare, score_translations

WORDS = ["the", "a", "dog", "cat", "sees", "hears", "likes", "old", "young", "house", "garden", "near", "big", "not"]
SAMPLES = 200


def corpus(seed: int = 0, size: int = 80) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 12))).capitalize() + "." for _ in range(size)]


def noisy(references: list[str], share: float, seed: int) -> list[str]:
    """Translations in which a share of the words is wrong."""
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) if draw.random() < share else word for word in x.split()) for x in references]


REFERENCES = corpus()
GOOD, MIDDLE, BAD = (noisy(REFERENCES, share, n) for n, share in enumerate([0.2, 0.25, 0.4]))


def test_scores_and_signatures_are_those_of_sacrebleu():
    score = score_translations(GOOD, REFERENCES, samples=SAMPLES)
    bleu, chrf = BLEU(), CHRF()
    assert score.bleu.score == pytest.approx(bleu.corpus_score(GOOD, [REFERENCES]).score)
    assert score.chrf.score == pytest.approx(chrf.corpus_score(GOOD, [REFERENCES]).score)
    assert score.sentences == len(REFERENCES)
    bleu.corpus_score(GOOD, [REFERENCES], n_bootstrap=SAMPLES)
    assert score.bleu.signature == str(bleu.get_signature())
    assert "bs:200|seed:12345" in score.bleu.signature
    values = score.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert set(values["bleu"]) == {"score", "low", "high", "signature"}


def test_intervals_are_those_of_sacrebleu():
    score = score_translations(MIDDLE, REFERENCES, samples=SAMPLES)
    for metric, ours in ((BLEU(), score.bleu), (CHRF(), score.chrf)):
        theirs = metric.corpus_score(MIDDLE, [REFERENCES], n_bootstrap=SAMPLES)
        assert (ours.high - ours.low) / 2 == pytest.approx(theirs._ci)
        assert ours.low < theirs._mean < ours.high


def test_options_reach_the_metrics():
    plain = score_translations([x.lower() for x in REFERENCES], REFERENCES, samples=1)
    lowered = score_translations([x.lower() for x in REFERENCES], REFERENCES, samples=1, lowercase=True)
    assert plain.bleu.score < 100.0 == pytest.approx(lowered.bleu.score)
    assert "case:lc" in lowered.bleu.signature
    plus = score_translations(GOOD, REFERENCES, samples=1, chrf_words=2)
    assert plus.chrf.score == pytest.approx(CHRF(word_order=2).corpus_score(GOOD, [REFERENCES]).score)
    characters = score_translations(GOOD, REFERENCES, samples=1, tokenize="char")
    assert characters.bleu.score == pytest.approx(BLEU(tokenize="char").corpus_score(GOOD, [REFERENCES]).score)


def test_several_references_for_each_sentence():
    sets = [REFERENCES, MIDDLE]
    score = score_translations(GOOD, sets, samples=1)
    assert score.bleu.score == pytest.approx(BLEU().corpus_score(GOOD, sets).score)
    assert score_translations(MIDDLE, sets, samples=1).bleu.score == pytest.approx(100.0)


def test_single_runs_compare_as_sacrebleu_compares_them():
    comparison = compare({"good": [GOOD], "middle": [MIDDLE], "bad": [BAD]}, REFERENCES, samples=SAMPLES)
    named = [("good", GOOD), ("middle", MIDDLE), ("bad", BAD)]
    signatures, theirs = PairedTest(named, {"BLEU": BLEU(), "chrF2": CHRF()}, [REFERENCES], "bs", SAMPLES)()
    for label, column in (("bleu", "BLEU"), ("chrf", "chrF2")):
        assert comparison.signatures[label] == str(signatures[column])
        for name, result in zip(theirs["System"], theirs[column], strict=True):
            ours = comparison.systems[name][label]
            assert ours.mean == pytest.approx(result.score)
            if name != "good":
                assert ours.p_value == pytest.approx(result.p_value)
    assert comparison.baseline == "good"
    assert comparison.systems["bad"]["bleu"].p_value < 0.05
    assert comparison.systems["bad"]["bleu"].high < 0.0
    itself = comparison.systems["good"]["bleu"]
    assert (itself.difference, itself.low, itself.high, itself.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_runs_of_a_system_are_averaged_on_every_resample():
    """Against a loop that scores each resample's sentences with sacreBLEU from text."""
    systems = {"a": [GOOD, MIDDLE], "b": [BAD, noisy(REFERENCES, 0.3, 9), noisy(REFERENCES, 0.3, 10)]}
    comparison = compare(systems, REFERENCES, samples=40)
    bleu = BLEU(force=True)
    differences = []
    for index in np.random.default_rng(12345).choice(len(REFERENCES), size=(40, len(REFERENCES)), replace=True):
        references = [[REFERENCES[i] for i in index]]
        means = {
            name: np.mean([bleu.corpus_score([run[i] for i in index], references).score for run in runs])
            for name, runs in systems.items()
        }
        differences.append(means["b"] - means["a"])
    ours = comparison.systems["b"]["bleu"]
    assert (ours.low, ours.high) == pytest.approx((sorted(differences)[1], sorted(differences)[-2]))
    scores = [bleu.corpus_score(run, [REFERENCES]).score for run in systems["b"]]
    assert ours.scores == pytest.approx(scores)
    assert ours.mean == pytest.approx(np.mean(scores))
    assert ours.spread == pytest.approx(np.std(scores, ddof=1))
    values = comparison.to_dict()
    assert json.loads(json.dumps(values))["systems"]["b"]["bleu"]["scores"] == pytest.approx(scores)


def test_luck_with_seeds_widens_the_interval():
    """Runs that differ more between themselves than systems do."""
    systems = {"a": [GOOD, BAD], "b": [BAD, GOOD]}
    fixed = compare(systems, REFERENCES, samples=SAMPLES).systems["b"]["bleu"]
    drawn = compare(systems, REFERENCES, samples=SAMPLES, resample_runs=True).systems["b"]["bleu"]
    assert fixed.high - fixed.low == pytest.approx(0.0, abs=1e-9)
    assert drawn.high - drawn.low > 10.0
    assert drawn.difference == pytest.approx(fixed.difference)


def test_the_same_seed_gives_the_same_figures():
    first, again = (score_translations(GOOD, REFERENCES, samples=50, seed=3).to_dict() for _ in range(2))
    assert first == again
    assert first["bleu"]["low"] != score_translations(GOOD, REFERENCES, samples=50, seed=4).bleu.low


def test_empty_translations_are_scored():
    assert score_translations(["", ""], ["a dog", "a cat"], samples=5).bleu.score == 0.0


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="1 translations but 2 references"):
        score_translations(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="references must be a list"):
        score_translations([], [])
    with pytest.raises(ValueError, match="got one text"):
        score_translations("a", ["a"])
    with pytest.raises(TypeError, match="must be texts, got NoneType"):
        score_translations([None], ["a"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="samples must be"):
        score_translations(["a"], ["a"], samples=0)
    with pytest.raises(ValueError, match="no system"):
        compare({}, ["a"])
    with pytest.raises(ValueError, match="baseline must be one of"):
        compare({"x": [["a"]]}, ["a"], baseline="y")
    with pytest.raises(ValueError, match="must be a list of runs"):
        compare({"x": ["a"]}, ["a"])
    with pytest.raises(ValueError, match="must be a list of runs"):
        compare({"x": []}, ["a"])
    with pytest.raises(ValueError, match="2 translations but 1 references"):
        compare({"x": [["a"]], "y": [["a", "b"]]}, ["a"])
