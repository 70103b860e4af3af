"""Verb groups: the finite verb, what goes with it, and where each language puts the two."""

from __future__ import annotations

from dataclasses import dataclass

from tamis.data.grammar.inflection import ER, ICH
from tamis.data.grammar.phrases import Links, Word, new_link
from tamis.data.grammar.syntax import Clause, person_of
from tamis.data.grammar.words import IRREGULAR_PAST, IRREGULAR_PRESENT, Verb

# English in the present and the past, empty where there is none, and German; "to" and the infinitive follow some.
MODALS = {
    "can": ("can", "could", "können"),
    "must": ("must", "had to", "müssen"),
    "should": ("should", "", "sollen"),
    "want": ("want to", "wanted to", "wollen"),
}

REFLEXIVES = ("mich", "dich", "sich", "uns", "sich")


@dataclass(slots=True)
class VerbGroup:
    auxiliary: Word | None
    """English: what "not" follows and questions begin with."""
    lexical: list[Word]
    """English: the other verbs."""
    finite: Word
    """German: second word of a statement, last word of a subordinate clause."""
    bracket: list[Word]
    """German: what ends a main clause, an infinitive or a participle."""
    link: Links
    """Links of the full verb."""
    prefix: str = ""
    """German: of a separable verb that is finite itself."""

    def german_end(self, *, final: bool) -> list[Word]:
        """The right end of the clause, the finite verb included where it is `final`."""
        if not final:
            return [*self.bracket, (self.prefix, self.link)] if self.prefix else self.bracket
        return [*self.bracket, (self.prefix + self.finite[0], self.finite[1])]


def verb_group(clause: Clause, *, inverted: bool) -> VerbGroup:
    """`inverted` where English has its subject after the auxiliary, which is then "do" if there is no other."""
    person, supported = person_of(clause.subject), clause.negated or inverted
    helper, link = new_link(), new_link()
    verb = clause.verb
    if verb is None:
        return _copula(clause.tense, person, link)
    past = clause.tense == "past"
    if clause.passive:
        finite = (IRREGULAR_PAST if past else IRREGULAR_PRESENT)["werden"][person]
        auxiliary: Word = (_be(person, past), helper)
        return VerbGroup(auxiliary, [(verb.participle, link)], (finite, helper), [(verb.german_participle, link)], link)
    if clause.modal:
        return _modal(clause.modal, past, verb, person, supported, helper, link)
    if clause.tense == "perfect":
        finite = IRREGULAR_PRESENT[verb.auxiliary][person]
        auxiliary = ("has" if person == ER else "have", helper)
        return VerbGroup(auxiliary, [(verb.participle, link)], (finite, helper), [(verb.german_participle, link)], link)
    if clause.tense == "future":
        bracket = [(verb.prefix + verb.infinitive, link)]
        finite = IRREGULAR_PRESENT["werden"][person]
        return VerbGroup(("will", helper), [(verb.base, link)], (finite, helper), bracket, link)
    finite = (verb.german_past if past else verb.german_present)[person]
    if supported:
        do, english = _do(person, past), verb.base
    else:
        do, english = None, verb.past if past else verb.third if person == ER else verb.base
    return VerbGroup(do, [(english, link)], (finite, link), [], link, verb.prefix)


def _modal(
    name: str,
    past: bool,
    verb: Verb,
    person: int,
    supported: bool,
    helper: Links,
    link: Links,
) -> VerbGroup:
    english = MODALS[name][past]
    german = (IRREGULAR_PAST if past else IRREGULAR_PRESENT)[MODALS[name][2]][person]
    bracket = [(verb.prefix + verb.infinitive, link)]
    if not english.endswith(" to"):
        return VerbGroup((english, helper), [(verb.base, link)], (german, helper), bracket, link)
    word = english.removesuffix(" to")
    if supported:
        auxiliary, word = _do(person, past), name
    else:
        auxiliary, word = None, word + "s" if person == ER and not past else word
    return VerbGroup(auxiliary, [(word, helper), ("to", ()), (verb.base, link)], (german, helper), bracket, link)


def _copula(tense: str, person: int, link: Links) -> VerbGroup:
    if tense == "future":
        helper = new_link()
        finite = (IRREGULAR_PRESENT["werden"][person], helper)
        return VerbGroup(("will", helper), [("be", link)], finite, [("sein", link)], link)
    past = tense == "past"
    finite = ((IRREGULAR_PAST if past else IRREGULAR_PRESENT)["sein"][person], link)
    return VerbGroup((_be(person, past), link), [], finite, [], link)


def _be(person: int, past: bool) -> str:
    if past:
        return "was" if person in (ICH, ER) else "were"
    return "am" if person == ICH else "is" if person == ER else "are"


def _do(person: int, past: bool) -> Word:
    """It has no counterpart in German and no link."""
    return "did" if past else "does" if person == ER else "do", ()


def infinitive_with_zu(verb: Verb, to: Links, link: Links) -> list[Word]:
    """zu sehen, but anzurufen."""
    if verb.prefix:
        return [(verb.prefix + "zu" + verb.infinitive, to + link)]
    return [("zu", to), (verb.infinitive, link)]
