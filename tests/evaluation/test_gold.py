"""Gold alignments are read as their formats say, and bad files are refused with the line that is wrong."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.evaluation import GoldPair, parse_links, read_gold, read_links, read_pharaoh
from tamis.evaluation.gold import locate

DATA = Path(__file__).parents[3] / "shared" / "data" / "align-gold"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the gold alignments of shared/data/align-gold are not here")


def test_sure_and_possible_links():
    sure, possible = parse_links("0-0 2p1 1-3")
    assert sure == {(0, 0), (1, 3)}
    assert possible == {(0, 0), (1, 3), (2, 1)}
    assert parse_links("1-1 3p2", one_based=True) == (frozenset({(0, 0)}), frozenset({(0, 0), (2, 1)}))
    assert parse_links("") == (frozenset(), frozenset())


@settings(deadline=None)
@given(st.sets(st.tuples(st.integers(0, 99), st.integers(0, 99))), st.booleans())
def test_written_links_are_read_back(links, one_based):
    text = " ".join(f"{s + one_based}-{t + one_based}" for s, t in sorted(links))
    assert parse_links(text, one_based=one_based) == (links, links)


@settings(deadline=None)
@given(st.text(max_size=12))
def test_garbage_is_links_or_a_clear_error(text):
    try:
        sure, possible = parse_links(text)
    except ValueError:
        with pytest.raises(ValueError, match="a link is written 0-0"):
            parse_links(text)
    else:
        assert sure <= possible


def test_words_are_found_in_their_text():
    assert locate(["Does", "it", "?"], "Does it?") == ((0, 4), (5, 7), (7, 8))
    assert locate(["a", "\u3000", "b"], "a \u3000 b") == ((0, 1), (2, 3), (4, 5))
    with pytest.raises(ValueError, match="should continue with 'dog'"):
        locate(["the", "dog"], "the old dog")
    with pytest.raises(ValueError, match="should continue"):
        locate(["the", "dog"], "the")


def test_pair_of_words_and_its_other_direction():
    pair = GoldPair.from_tokens(["das", "Haus"], ["the", "big", "house"], [(0, 0), (1, 2)], [(1, 1)])
    assert (pair.source, pair.target) == ("das Haus", "the big house")
    assert pair.possible == {(0, 0), (1, 1), (1, 2)}
    other = pair.swapped()
    assert other.sure == {(0, 0), (2, 1)}
    assert [other.source[slice(*span)] for span in other.source_spans] == ["the", "big", "house"]
    assert other.swapped() == pair


def test_a_detokeniser_may_join_the_words():
    pair = GoldPair.from_tokens(["Ja", "!"], ["Yes", "!"], [(0, 0), (1, 1)], join="".join)
    assert pair.source == "Ja!"
    assert pair.source_spans == ((0, 2), (2, 3))


@pytest.mark.parametrize("link", [(2, 0), (0, 2), (-1, 0)])
def test_links_outside_the_words_are_refused(link):
    with pytest.raises(ValueError, match="outside 2 source and 2 target words"):
        GoldPair.from_tokens(["a", "b"], ["c", "d"], [link])


def test_spans_outside_the_text_are_refused():
    with pytest.raises(ValueError, match="outside a text of 1 characters"):
        GoldPair(
            source="a", target="b", source_spans=((0, 2),), target_spans=(), sure=frozenset(), possible=frozenset()
        )


def test_tables_and_their_faults(tmp_path):
    path = tmp_path / "gold.tsv.xz"
    path.write_bytes(lzma.compress("a\u00a0b c\td\t0-0 1p0\n\t\t\n".encode()))
    first, second = read_gold(path)
    assert (first.source_spans, first.sure, first.possible) == (((0, 3), (4, 5)), {(0, 0)}, {(0, 0), (1, 0)})
    assert (second.source, second.source_spans, second.possible) == ("", (), frozenset())
    plain = tmp_path / "gold.tsv"
    for text, expected in [
        ("a\tb\t0-0\na b\n", "line 2: source, target and links make 3 columns, got 1"),
        ("a\tb\t0:0\n", "line 1: a link is written 0-0"),
        ("a\tb\t0-1\n", "line 1: link 0-1 is outside"),
    ]:
        plain.write_text(text)
        with pytest.raises(ValueError, match=expected):
            read_gold(plain)


def test_pharaoh_files(tmp_path):
    names = {"links": "1-1 2p1\n", "source": "ein Haus\n", "target": "house\n"}
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    links, source, target = (tmp_path / name for name in names)
    (pair,) = read_pharaoh(links, source, target, one_based=True)
    assert (pair.sure, pair.possible) == ({(0, 0)}, {(0, 0), (1, 0)})
    assert read_links(links, swapped=True) == [{(1, 1), (1, 2)}]
    target.write_text("house\nmouse\n")
    with pytest.raises(ValueError, match=r"same number of lines: .*links has 1, .*source has 1, .*target has 2"):
        read_pharaoh(links, source, target)
    links.write_text("1-1\nx\n")
    with pytest.raises(ValueError, match="line 2: a link is written"):
        read_links(links)


@needs_data
def test_the_sets_have_the_sizes_that_their_makers_counted():
    for row in json.loads((DATA / "stats.json").read_text()):
        gold = read_gold(DATA / f"{row['name']}.tsv.xz")
        assert len(gold) == row["sents"]
        assert sum(len(pair.source_spans) for pair in gold) == row["src_tokens"]
        assert sum(len(pair.target_spans) for pair in gold) == row["tgt_tokens"]
        assert sum(len(pair.sure) for pair in gold) == row["sure"]
        assert sum(len(pair.possible - pair.sure) for pair in gold) == row["possible"]
