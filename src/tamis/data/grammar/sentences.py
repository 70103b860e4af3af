"""Whole sentences: clauses joined, punctuated, capitalised, and their links read off."""

from __future__ import annotations

from tamis.data.grammar.clauses import INTERROGATIVES, question, statement, subordinate, verb_first
from tamis.data.grammar.example import Example
from tamis.data.grammar.phrases import COMMA, Phrase, Word, new_link
from tamis.data.grammar.syntax import Coordination, Question, Sentence, Statement, Subordination

CONJUNCTIONS = {
    "because": "weil",
    "although": "obwohl",
    "while": "während",
    "before": "bevor",
    "if": "wenn",
    "when": "als",  # in the past tense only
    "and": "und",
    "but": "aber",
}


def realise(sentence: Sentence) -> Example:
    """Spell a tree out in both languages."""
    match sentence:
        case Statement(clause):
            phrase = statement(clause)
        case Question(clause, interrogative, gap):
            phrase = question(clause, gap)
            if interrogative:
                link = new_link()
                english, german = INTERROGATIVES[interrogative]
                phrase = Phrase([(english, link), *phrase.english], [(german, link), *phrase.german])
        case Subordination():
            phrase = _subordination(sentence)
        case Coordination(first, conjunction, second):
            left, right = statement(first), statement(second)
            comma, link = (",", new_link()), new_link()
            phrase = Phrase(
                [*left.english, comma, (conjunction, link), *right.english],
                [*left.german, comma, (CONJUNCTIONS[conjunction], link), *right.german],
            )
    end = ("?" if isinstance(sentence, Question) else ".", new_link())
    return _example([*phrase.english, end], [*phrase.german, end])


def _subordination(sentence: Subordination) -> Phrase:
    link, inner = new_link(), subordinate(sentence.subordinate)
    english = [(sentence.conjunction, link), *inner.english]
    german = [(CONJUNCTIONS[sentence.conjunction], link), *inner.german]
    if sentence.subordinate_first:
        comma, main = (",", new_link()), verb_first(sentence.main)
        return Phrase([*english, comma, *main.english], [*german, comma, *main.german])
    main = statement(sentence.main)
    return Phrase([*main.english, *english], [*main.german, COMMA, *german])


def _example(english: list[Word], german: list[Word]) -> Example:
    german = _single_commas(german)
    places: dict[object, list[int]] = {}
    for number, (_, links) in enumerate(english):
        for link in links:
            places.setdefault(link, []).append(number)
    pairs = frozenset(
        (source, target)
        for target, (_, links) in enumerate(german)
        for link in links
        for source in places.get(link, ())
    )
    return Example(_capitalised(english), _capitalised(german), pairs)


def _single_commas(words: list[Word]) -> list[Word]:
    """A comma that closes a clause goes where other punctuation follows."""
    kept: list[Word] = []
    for word in words:
        if kept and kept[-1][0] == "," and word[0] in (",", ".", "?"):
            kept[-1] = word
        else:
            kept.append(word)
    return kept


def _capitalised(words: list[Word]) -> tuple[str, ...]:
    first = words[0][0]
    return (first[0].upper() + first[1:], *(word for word, _ in words[1:]))
