"""Which words a sentence puts together: what the splits are made by."""

from __future__ import annotations

from collections.abc import Iterator

from tamis.data.grammar.syntax import (
    Both,
    Clause,
    Coordination,
    Nominal,
    NounPhrase,
    Place,
    Question,
    RelativePronoun,
    Sentence,
    Statement,
    Subordination,
)
from tamis.data.grammar.words import Noun

Combination = tuple[str, str, str]
"""The kind, and the two that are combined."""


def combinations(sentence: Sentence) -> list[Combination]:
    """Verb with subject and object, adjective with noun, noun with construction, and so on; read off the tree."""
    match sentence:
        case Statement(clause):
            return list(_of_clause(clause))
        case Question(clause, _, gap):
            asked = getattr(clause, gap) if gap else None
            own = [("construction", "question", noun.lemma) for noun in _nouns(asked)]
            return [*own, *_of_clause(clause)]
        case Subordination(main, _, subordinate):
            return [*_of_clause(main), *_of_clause(subordinate)]
        case Coordination(first, _, second):
            return [*_of_clause(first), *_of_clause(second)]


def _of_clause(clause: Clause) -> Iterator[Combination]:
    quality = clause.quality
    for noun in _nouns(clause.subject):
        if clause.verb is not None:
            yield "object" if clause.passive else "subject", clause.verb.lemma, noun.lemma
        if quality is not None:
            yield "adjective", quality.adjective.english, noun.lemma
        if clause.passive:
            yield "construction", "passive", noun.lemma
    if clause.verb is not None and not clause.passive:
        for noun in _nouns(clause.object):
            yield "object", clause.verb.lemma, noun.lemma
    for node in (clause.subject, clause.object, clause.recipient, quality.than if quality is not None else None):
        yield from _of_nominal(node)
    yield from _of_place(clause.place)
    if clause.content is not None:
        yield from _of_clause(clause.content.clause)


def _of_nominal(node: Nominal | None) -> Iterator[Combination]:
    if isinstance(node, Both):
        yield from _of_nominal(node.first)
        yield from _of_nominal(node.second)
    if not isinstance(node, NounPhrase):
        return
    noun = node.noun
    if noun.modifier:
        yield "compound", noun.modifier, noun.singular
    for adjective in node.adjectives:
        yield "adjective", adjective.english, noun.lemma
    for owner in _nouns(node.possessor):
        yield "possessor", owner.lemma, noun.lemma
    yield from _of_nominal(node.possessor)
    yield from _of_place(node.place)
    if node.relative is not None:
        yield "construction", "relative", noun.lemma
        yield from _of_clause(node.relative.clause)


def _of_place(place: Place | None) -> Iterator[Combination]:
    if place is not None:
        for noun in _nouns(place.nominal):
            yield "place", place.preposition, noun.lemma
        yield from _of_nominal(place.nominal)


def _nouns(node: Nominal | None) -> tuple[Noun, ...]:
    match node:
        case NounPhrase() | RelativePronoun():
            return (node.noun,)
        case Both(first, second):
            return (*_nouns(first), *_nouns(second))
    return ()
