"""AER against known scores of public aligners, and alignments by attention against loops over subwords and words."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tamis.analysis import capture
from tamis.data import Vocabulary
from tamis.data.grammar import generate
from tamis.evaluation import (
    AlignmentScore,
    GoldPair,
    aer,
    alignment,
    attention_alignment,
    read_gold,
    read_links,
    score_links,
)
from tamis.evaluation.alignment import membership, strongest
from tamis.models import Seq2Seq, Seq2SeqConfig

DATA = Path(__file__).parents[3] / "shared" / "data" / "align-gold"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the gold alignments of shared/data/align-gold are not here")

SETS = {
    "deen": "de-en.rwth.test",
    "roen": "ro-en.wpt2003.test",
    "enfr": "en-fr.hansards.test",
    "jaen": "ja-en.kftt.test",
    "zhen": "zh-en.tsinghua.test",
}
PUBLISHED = {
    "fastalign.deen": 28.5,
    "fastalign.deen.reverse": 32.0,
    "fastalign.deen.grow-diagonal": 27.0,
    "giza.deen": 21.0,
    "giza.deen.reverse": 23.1,
    "giza.deen.grow-diagonal": 21.4,
    "fastalign.roen": 33.8,
    "fastalign.roen.reverse": 35.6,
    "fastalign.roen.grow-diagonal": 32.1,
    "giza.roen": 28.7,
    "giza.roen.reverse": 32.2,
    "giza.roen.grow-diagonal": 27.9,
    "fastalign.enfr": 16.4,
    "fastalign.enfr.reverse": 15.9,
    "fastalign.enfr.grow-diagonal": 10.5,
    "giza.enfr": 8.0,
    "giza.enfr.reverse": 9.8,
    "giza.enfr.grow-diagonal": 5.9,
    "awesome-align.jaen": 37.4,
    "awesome-align.zhen": 13.3,
    "awesome-align.roen": 20.7,
    "awesome-align.enfr": 4.1,
}
links_of_words = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)))


@pytest.fixture(scope="module")
def baselines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baselines")
    with tarfile.open(DATA / "baselines.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "baselines"


@needs_data
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_error_rates_are_reproduced(name, baselines):
    links = read_links(baselines / f"{name}.talp", swapped=name.endswith("reverse"))
    score = score_links(links, read_gold(DATA / f"{SETS[name.split('.')[1]]}.tsv.xz"))
    assert 100 * score.aer == pytest.approx(PUBLISHED[name], abs=0.1)


@needs_data
@pytest.mark.parametrize("system", ["fastalign", "giza"])
@pytest.mark.parametrize("pair", ["deen", "roen", "enfr"])
def test_published_precision_and_recall_are_reproduced(system, pair, baselines):
    """Lines of the makers' own results: "test.deen.talp: 28.5% (71.3%/71.8%/9930)".

    The last number, |A|, is that of another run of the aligners: it differs by up to 5 from what the files hold.
    """
    published = dict(line.split(": ") for line in (baselines / f"{system}.{pair}.results.txt").read_text().splitlines())
    gold = read_gold(DATA / f"{SETS[pair]}.tsv.xz")
    for variant in ("", ".reverse", ".grow-diagonal"):
        links = read_links(baselines / f"{system}.{pair}{variant}.talp", swapped=variant == ".reverse")
        score = score_links(links, gold)
        precision, recall, _ = published[f"test.{pair}{variant}.talp"].split("(")[1].split("/")
        assert 100 * score.precision == pytest.approx(float(precision.rstrip("%")), abs=0.1)
        assert 100 * score.recall == pytest.approx(float(recall.rstrip("%")), abs=0.1)


@settings(deadline=None)
@given(links_of_words, links_of_words, links_of_words)
def test_error_rate_is_the_formula(links, sure, extra):
    possible = sure | extra
    value = aer(links, sure, extra)
    assert 0.0 <= value <= 1.0
    if links or sure:
        assert value == pytest.approx(1 - (len(links & sure) + len(links & possible)) / (len(links) + len(sure)))
    assert aer(sure, sure, extra) == 0.0
    if sure:
        assert aer(set(), sure, extra) == 1.0


def test_counts_are_summed_over_sentences():
    """Not means of sentences: 3 of 4 links are right, of 5 that are sure."""
    gold = [
        GoldPair.from_tokens(["a", "b", "c"], ["d", "e", "f"], [(0, 0), (1, 1), (2, 2)]),
        GoldPair.from_tokens(["a", "b"], ["d", "e"], [(0, 0), (1, 1)], [(0, 1)]),
    ]
    score = score_links([{(0, 0), (0, 2)}, {(0, 1), (1, 1)}], gold)
    assert score.links == 4
    assert score.precision == pytest.approx(3 / 4)
    assert score.recall == pytest.approx(2 / 5)
    assert score.aer == pytest.approx(1 - (2 + 3) / (4 + 5))
    assert score.f1 == pytest.approx(2 * 0.75 * 0.4 / 1.15)
    with pytest.raises(ValueError, match="links for 1 sentences but gold for 2"):
        score_links([set()], gold)


def test_nothing_found_and_nothing_to_find():
    assert AlignmentScore.from_counts(0, 3, 0, 0).to_dict() == {
        "aer": 1.0,
        "precision": 0.0,
        "recall": 0.0,
        "f1": 0.0,
        "links": 0,
    }
    assert AlignmentScore.from_counts(0, 0, 0, 0).aer == 0.0


def test_subwords_belong_to_the_words_that_they_overlap():
    """ "ab cd" in pieces "a", "b c", "d" and one that is only a space."""
    table = membership([(0, 1), (1, 4), (4, 5), (2, 2)], [(0, 2), (3, 5)])
    assert table.tolist() == [[True, False], [True, True], [False, True], [False, False]]
    assert membership([], [(0, 1)]).shape == (0, 1)


def test_null_rows_have_no_strongest_key():
    weights = torch.tensor([[0.1, 0.7, 0.2], [0.0, 0.0, 0.0], [0.0, 0.0, 0.9]])
    assert strongest(weights, torch.tensor([True, True, False])).tolist() == [1, -1, -1]


# ---------------------------------------------------------------------------------------------------------------
# Alignment by attention


class Letters:
    """A vocabulary whose pieces are runs of two characters of a word, so that words have several."""

    pad_id, bos_id, eos_id, unk_id = 0, 1, 2, 3

    def __len__(self) -> int:
        return 40

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, spans, begin = [], [], 0
        for word in text.split(" "):
            for start in range(0, len(word), 2):
                piece = word[start : start + 2]
                ids.append(4 + sum(map(ord, piece)) % 36)
                spans.append((begin + start, begin + start + len(piece)))
            begin += len(word) + 1
        return ids, spans


def words(text: str) -> list[str]:
    return text.split()


VOCABULARY: Any = Letters()
GOLD = [
    GoldPair.from_tokens(words("das kleine Haus brennt"), words("the small house burns"), [(0, 0), (2, 2)], [(1, 1)]),
    GoldPair.from_tokens(words("ja"), words("yes of course"), [(0, 0), (0, 2)]),
    GoldPair.from_tokens([], ["hm"], []),
    GoldPair.from_tokens(words("wer ist das"), [], []),
    GoldPair.from_tokens(words("ein Hund sieht eine Katze"), words("a dog sees a cat"), [(n, n) for n in range(5)]),
]


def model_of(mechanism: str) -> Seq2Seq:
    torch.manual_seed(2)
    chosen = {f"{site}_mechanism": mechanism for site in ("encoder", "decoder", "cross")}
    sizes = {"vocab_size": 40, "embed_dim": 16, "num_heads": 4, "ffn_dim": 24, "encoder_layers": 1, "decoder_layers": 2}
    model = Seq2Seq(Seq2SeqConfig(**sizes, **chosen))
    with torch.no_grad():  # sharper than at the start, so that heads differ and ReLU attention has null rows
        for layer in model.decoder:
            layer.cross_attention.q_proj.weight *= 4
            layer.cross_attention.q_proj.bias += torch.randn(16)
            layer.cross_attention.k_proj.bias += torch.randn(16)
    return model


def expected_links(weights: Tensor, pair: GoldPair, shift: int, end: str) -> set[tuple[int, int]]:
    """From weights (Lt, Ls) of one sentence without padding, by the definition."""
    (source, source_spans), (target, target_spans) = VOCABULARY.spans(pair.source), VOCABULARY.spans(pair.target)
    links = set()
    for number in range(len(target)):
        row = weights[number + shift].tolist()
        if end == "ignore":
            row = row[: len(source)]
        if not row or max(row) <= 0.0 or row.index(max(row)) == len(source):
            continue
        piece = source_spans[row.index(max(row))]
        for s, word in enumerate(pair.source_spans):
            for t, other in enumerate(pair.target_spans):
                if set(range(*piece)) & set(range(*word)) and set(range(*target_spans[number])) & set(range(*other)):
                    links.add((s, t))
    return links


@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "rela"])
@pytest.mark.parametrize("end", ["drop", "ignore"])
def test_attention_is_aligned_as_defined(mechanism, end):
    model = model_of(mechanism)
    report = attention_alignment(model, VOCABULARY, VOCABULARY, GOLD, end=end, batch_tokens=30)
    assert model.training  # as it was
    weights: list[dict[str, Tensor]] = []
    for pair in GOLD:  # one at a time, so without padding
        source = torch.tensor([[*VOCABULARY.spans(pair.source)[0], 2]])
        target = torch.tensor([[1, *VOCABULARY.spans(pair.target)[0]]])
        with torch.no_grad(), capture(model.eval()) as captured:
            model(source, target)
        weights.append(dict(captured))
    for cell in report.cells():
        site = f"decoder.{cell.layer}.cross"
        chosen = [x[site][0].mean(0) if cell.head is None else x[site][0, cell.head] for x in weights]
        shift = ["normal", "shifted"].index(cell.mode)
        links = [expected_links(w, pair, shift, end) for w, pair in zip(chosen, GOLD, strict=True)]
        expected = score_links(links, GOLD)
        assert cell.score.links == expected.links
        assert cell.score == expected
    for mode, layers in (("normal", report.normal), ("shifted", report.shifted)):
        for number, layer in enumerate(layers):
            shift, links = ["normal", "shifted"].index(mode), []
            for found, pair in zip(weights, GOLD, strict=True):
                alive = [
                    head / head.sum(-1, keepdim=True).clamp(min=1e-30) for head in found[f"decoder.{number}.cross"][0]
                ]
                links.append(expected_links(torch.stack(alive).mean(0), pair, shift, end))
            assert layer.normalised == score_links(links, GOLD)
    if mechanism == "rela":
        assert any(layer.normalised != layer.average for layer in report.normal)
        nulls = sum(int((x["decoder.0.cross"] == 0).all(-1).sum()) for x in weights)
        assert nulls > 0  # so the case was tested


def test_reports_name_the_best_cell_and_are_json():
    report = attention_alignment(model_of("softmax"), VOCABULARY, VOCABULARY, GOLD)
    assert len(list(report.cells())) == 2 * 2 * (4 + 1)
    assert report.best.score.aer == min(cell.score.aer for cell in report.cells())
    layer = report.shifted[1]
    assert layer.heads[layer.best_head].aer == min(score.aer for score in layer.heads)
    values = report.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["normal"][1]["heads"][3]["aer"] == report.normal[1].heads[3].aer
    assert values["best"]["aer"] == report.best.score.aer
    assert values["best"]["low"] <= values["best"]["aer"] <= values["best"]["high"]
    lines = report.describe().splitlines()
    assert len(lines) == 5
    assert len(lines[0]) == len(lines[1])


def test_the_interval_is_that_of_the_bootstrap():
    counts = torch.randint(1, 9, (60, 4, 2, 1, 3), generator=torch.Generator().manual_seed(0))
    counts[:, 2:] = torch.minimum(counts[:, 2:], torch.minimum(counts[:, :1], counts[:, 1:2]))
    rng = np.random.default_rng(0)
    lowest = []
    for _ in range(2000):
        links, sure, hit, possible = counts[rng.integers(60, size=60)].sum(0).flatten(1).double().numpy()
        lowest.append((1 - (hit + possible) / (links + sure)).min())
    expected = np.quantile(lowest, [0.025, 0.975])
    np.testing.assert_allclose(alignment._interval(counts), expected, atol=0.01)
    same = counts[:1].expand(60, *counts.shape[1:])  # pairs that do not differ leave nothing to chance
    low, high = alignment._interval(same)
    assert high - low < 1e-6


def test_what_cannot_be_aligned_is_refused():
    model = model_of("softmax")
    with pytest.raises(ValueError, match="no gold pair"):
        attention_alignment(model, VOCABULARY, VOCABULARY, [])
    with pytest.raises(ValueError, match="end must be one of drop, ignore"):
        attention_alignment(model, VOCABULARY, VOCABULARY, GOLD, end="keep")


def test_the_embedded_corpus_with_a_subword_vocabulary():
    examples = generate(60, "test")
    gold = [GoldPair.from_example(example) for example in examples]
    for pair, example in zip(gold, examples, strict=True):
        assert tuple(pair.source[slice(*span)] for span in pair.source_spans) == example.source
        assert tuple(pair.target[slice(*span)] for span in pair.target_spans) == example.target
        assert pair.sure == pair.possible == example.links
    vocabulary = Vocabulary.train([text for pair in gold for text in (pair.source, pair.target)], 200)
    for pair in gold:  # every word has its subwords
        spans = vocabulary.spans(pair.target)[1]
        assert membership(spans, pair.target_spans).any(0).all()
    torch.manual_seed(0)
    model = Seq2Seq(Seq2SeqConfig(vocab_size=200, embed_dim=16, num_heads=4, ffn_dim=16, decoder_layers=1))
    whole = attention_alignment(model, vocabulary, vocabulary, gold)
    assert whole.pairs == 60
    assert attention_alignment(model, vocabulary, vocabulary, gold, batch_tokens=1) == whole


@pytest.mark.gpu
@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "rela"])
def test_a_gpu_gives_the_same_report(mechanism):
    model = model_of(mechanism)
    expected = attention_alignment(model, VOCABULARY, VOCABULARY, GOLD)
    assert attention_alignment(model.cuda(), VOCABULARY, VOCABULARY, GOLD) == expected
