"""Noun phrases and prepositional phrases in both languages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tamis.data.grammar.inflection import (
    ACCUSATIVE,
    DATIVE,
    DEFINITE,
    GENITIVE,
    NOMINATIVE,
    RELATIVE,
    WEAK,
    Table,
    indefinite_article,
)
from tamis.data.grammar.syntax import Both, Name, Nominal, NounPhrase, Place, Pronoun, RelativePronoun
from tamis.data.grammar.words import DETERMINERS, Adverbial, Noun

Links = tuple[object, ...]
"""Words of the two languages that share a link translate each other."""
Word = tuple[str, Links]

COMMA: Word = (",", ())

# Nominative and object in English; nominative, accusative and dative in German.
PRONOUNS = {
    "I": ("I", "me", "ich", "mich", "mir"),
    "you": ("you", "you", "du", "dich", "dir"),
    "he": ("he", "him", "er", "ihn", "ihm"),
    "she": ("she", "her", "sie", "sie", "ihr"),
    "it": ("it", "it", "es", "es", "ihm"),
    "we": ("we", "us", "wir", "uns", "uns"),
    "they": ("they", "them", "sie", "sie", "ihnen"),
    "who": ("who", "whom", "wer", "wen", "wem"),
    "what": ("what", "what", "was", "was", "was"),
}
# German and the case of a location; directions take the accusative after a preposition of both.
PREPOSITIONS = {
    "in": ("in", DATIVE),
    "into": ("in", ACCUSATIVE),
    "on": ("auf", DATIVE),
    "onto": ("auf", ACCUSATIVE),
    "under": ("unter", DATIVE),
    "behind": ("hinter", DATIVE),
    "beside": ("neben", DATIVE),
    "in front of": ("vor", DATIVE),
    "to": ("zu", DATIVE),
    "from": ("aus", DATIVE),
    "with": ("mit", DATIVE),
    "without": ("ohne", ACCUSATIVE),
}
TWO_WAY = frozenset({"under", "behind", "beside", "in front of"})
CONTRACTIONS = {
    ("in", "dem"): "im",
    ("in", "das"): "ins",
    ("an", "dem"): "am",
    ("an", "das"): "ans",
    ("zu", "dem"): "zum",
    ("zu", "der"): "zur",
    ("von", "dem"): "vom",
}


class Phrase(NamedTuple):
    english: list[Word]
    german: list[Word]


def new_link() -> Links:
    return (object(),)


def nominal(node: Nominal, case: int, negation: object | None = None) -> Phrase:
    """Spell out a nominal.  With `negation`, a noun phrase with "a" or without article becomes one with kein."""
    match node:
        case NounPhrase():
            return _noun_phrase(node, case, negation)
        case Pronoun(word):
            forms = PRONOUNS[word]
            link = new_link()
            return Phrase([(forms[case != NOMINATIVE], link)], [(forms[2 + case], link)])
        case Name(name):
            link = new_link()
            return Phrase([(name, link)], [(name + "s" if case == GENITIVE else name, link)])
        case RelativePronoun():
            return relative_pronoun(node, case, after_preposition=False)
        case Both(first, second):
            left, right, link = nominal(first, case), nominal(second, case), new_link()
            return Phrase([*left.english, ("and", link), *right.english], [*left.german, ("und", link), *right.german])


def relative_pronoun(node: RelativePronoun, case: int, *, after_preposition: bool) -> Phrase:
    link = new_link()
    if "person" in node.noun.kinds:
        english = "who" if case == NOMINATIVE else "whom"
    else:
        english = "which" if after_preposition else "that"
    return Phrase([(english, link)], [(RELATIVE[case][node.noun.column(node.plural)], link)])


def _noun_phrase(node: NounPhrase, case: int, negation: object | None) -> Phrase:
    column = node.noun.column(node.plural)
    english, german, endings = _opening(node, case, column, negation)
    for adjective in node.adjectives:
        link = new_link()
        english.append((adjective.english, link))
        german.append((adjective.stem + endings[case][column], link))
    head = _noun(node.noun, node.plural, case)
    english += head.english
    german += head.german
    if node.determiner == "a":  # its form depends on the word that follows
        english[0] = (indefinite_article(english[1][0]), english[0][1])
    if node.possessor is not None and not isinstance(node.possessor, Name):
        possessor = nominal(node.possessor, GENITIVE)
        german += possessor.german
        if node.before:
            english[:0] = [*possessor.english[:-1], _owning(possessor.english[-1])]
        else:
            english += [("of", possessor.german[0][1]), *possessor.english]
    if node.place is not None:
        place = place_phrase(node.place, nominal(node.place.nominal, case_of(node.place)))
        english += place.english
        german += place.german
    return Phrase(english, german)


def _opening(node: NounPhrase, case: int, column: int, negation: object | None) -> tuple[list[Word], list[Word], Table]:
    """Article or what stands for it, and the endings of the adjectives that follow."""
    if isinstance(node.possessor, Name):
        name = nominal(node.possessor, GENITIVE)
        return [_owning(name.english[0])], [name.german[0]], DETERMINERS["whose"].adjectives
    if node.before and node.possessor is not None:  # the article of "the man's dog" belongs to the man
        return [], [(DEFINITE[case][column], ())], WEAK
    if negation is not None and node.determiner in ("a", ""):
        determiner, links = DETERMINERS["not a"], [(*new_link(), negation)]
    else:
        determiner = DETERMINERS[node.determiner]
        links = [new_link() for _ in determiner.german.split()] or [new_link()]
    words = DETERMINERS[node.determiner].plural if node.plural else DETERMINERS[node.determiner].singular
    german = determiner.german + determiner.endings[case][column]
    return (
        list(zip(words.split(), links, strict=False)),
        list(zip(german.split(), links, strict=False)),
        determiner.adjectives,
    )


def _owning(word: Word) -> Word:
    return word[0] + "'s", word[1]


def _noun(noun: Noun, plural: bool, case: int) -> Phrase:
    link = new_link()
    english = [(noun.plural if plural else noun.singular, link)]
    if noun.modifier:
        english.insert(0, (noun.modifier, link))
    return Phrase(english, [(noun.german[plural][case], link)])


def prepositional(english: str, german: str, inner: Phrase, links: Links, *, contracted: bool) -> Phrase:
    """A preposition, all of whose words have `links`, and what it governs; in dem gives im where `contracted`."""
    words: list[Word] = [(german, links), *inner.german]
    short = CONTRACTIONS.get((german, inner.german[0][0])) if contracted else None
    if short is not None:
        words[:2] = [(short, links + inner.german[0][1])]
    return Phrase([*((word, links) for word in english.split()), *inner.english], words)


def contracts(node: Nominal) -> bool:
    """Whether a preposition may swallow the article.  A restrictive clause keeps it: in dem Haus, das ich sehe."""
    named = isinstance(node, NounPhrase) and isinstance(node.possessor, Name)
    return isinstance(node, NounPhrase) and node.determiner == "the" and node.relative is None and not named


def case_of(node: Place) -> int:
    return ACCUSATIVE if node.towards and node.preposition in TWO_WAY else PREPOSITIONS[node.preposition][1]


def place_phrase(node: Place, inner: Phrase) -> Phrase:
    german = PREPOSITIONS[node.preposition][0]
    return prepositional(node.preposition, german, inner, new_link(), contracted=contracts(node.nominal))


def adverbial(node: Adverbial | None) -> Phrase:
    """Empty for None."""
    if node is None:
        return Phrase([], [])
    links: dict[int, object] = {}

    def spelled(words: Iterable[tuple[str, int]]) -> list[Word]:
        return [(word, (links.setdefault(number, object()),)) for word, number in words]

    return Phrase(spelled(node.english), spelled(node.german))
