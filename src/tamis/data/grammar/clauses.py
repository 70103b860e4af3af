"""Clauses: the order of their parts in both languages."""

from __future__ import annotations

from dataclasses import dataclass, field

from tamis.data.grammar.inflection import DATIVE, NOMINATIVE
from tamis.data.grammar.phrases import (
    COMMA,
    Links,
    Phrase,
    Word,
    adverbial,
    case_of,
    contracts,
    new_link,
    nominal,
    place_phrase,
    prepositional,
    relative_pronoun,
)
from tamis.data.grammar.syntax import Clause, Content, Nominal, NounPhrase, Pronoun, Quality, RelativePronoun, person_of
from tamis.data.grammar.verbs import REFLEXIVES, VerbGroup, infinitive_with_zu, verb_group

INTERROGATIVES = {
    "where": ("where", "wo"),
    "where to": ("where", "wohin"),
    "when": ("when", "wann"),
    "why": ("why", "warum"),
    "how": ("how", "wie"),
    "that": ("that", "dass"),
    "whether": ("whether", "ob"),
}


@dataclass(slots=True)
class _Objects:
    """What the verb takes, in the order of English, and in the slots of German's middle field."""

    front: Phrase | None = None
    """The part that is asked for or that a relative pronoun stands for."""
    english: list[Word] = field(default_factory=list)
    pronouns: list[Word] = field(default_factory=list)
    dative: list[Word] = field(default_factory=list)
    accusative: list[Word] = field(default_factory=list)
    governed: list[Word] = field(default_factory=list)
    """By a preposition that belongs to the verb."""
    negated: bool = False
    """Whether kein has said what nicht would."""

    def put(self, slot: list[Word], phrase: Phrase, *, in_front: bool) -> None:
        if in_front:
            self.front = phrase
        else:
            self.english += phrase.english
            slot += phrase.german


def spelled(node: Nominal, case: int, negation: object | None = None) -> Phrase:
    """A nominal with its relative clause."""
    phrase = nominal(node, case, negation)
    if isinstance(node, NounPhrase) and node.relative is not None:
        clause, gap = node.relative.clause, node.relative.gap
        inner = subordinate(clause, gap="" if gap == "subject" else gap)
        phrase.english.extend(inner.english)
        phrase.german.extend([COMMA, *inner.german, COMMA])
    return phrase


def statement(clause: Clause) -> Phrase:
    """English subject first; German verb second."""
    if clause.opening is not None:
        opening, rest = adverbial(clause.opening), _ordered(clause, german="first")
        return Phrase(opening.english + rest.english, opening.german + rest.german)
    return _ordered(clause, german="second")


def verb_first(clause: Clause) -> Phrase:
    """What follows a subordinate clause: English order as in a statement, German verb first."""
    return _ordered(clause, german="first")


def question(clause: Clause, gap: str) -> Phrase:
    """Inverted in both languages, unless the subject is what is asked for."""
    if gap == "subject":
        return _ordered(clause, german="second")
    return _ordered(clause, german="first", inverted=True, gap=gap)


def subordinate(clause: Clause, gap: str = "") -> Phrase:
    """German verb last; the part named by `gap` first."""
    return _ordered(clause, german="last", gap=gap)


def content(node: Content) -> Phrase:
    """A clause as object, without the comma before it."""
    if node.opening == "to":
        return _infinitive(node.clause)
    link = new_link()
    english, german = INTERROGATIVES[node.opening]
    inner = subordinate(node.clause)
    return Phrase([(english, link), *inner.english], [(german, link), *inner.german])


def _ordered(clause: Clause, *, german: str, inverted: bool = False, gap: str = "") -> Phrase:
    """The whole clause.  `german` says where its finite verb stands: "first", "second" or "last"."""
    group = verb_group(clause, inverted=inverted)
    subject = spelled(clause.subject, NOMINATIVE)
    not_link = object()
    objects = _objects(clause, group.link, not_link if clause.negated else None, gap)
    rest = _adjuncts(clause)
    front = objects.front or Phrase([], [])
    verbs = _english_verbs(group, subject.english, rest["frequency"].english, clause.negated, not_link, inverted)
    english = [*front.english, *verbs, *objects.english, *_english_tail(rest)]

    negation: list[Word] = [("nicht", (not_link,))] if clause.negated and not objects.negated else []
    middle = _german_middle(clause, group.link, objects, rest, negation)
    if german == "second":
        words = [*subject.german, group.finite, *middle, *group.german_end(final=False)]
    elif german == "first":
        words = [*front.german, group.finite, *subject.german, *middle, *group.german_end(final=False)]
    else:
        words = [*front.german, *subject.german, *middle, *group.german_end(final=True)]
    return Phrase(english, words + rest["content"].german)


def _infinitive(clause: Clause) -> Phrase:
    """to call him; ihn anzurufen."""
    assert clause.verb is not None
    to, link = new_link(), new_link()
    objects, rest = _objects(clause, link, None, ""), _adjuncts(clause)
    middle = _german_middle(clause, link, objects, rest, [])
    return Phrase(
        [("to", to), (clause.verb.base, link), *objects.english, *_english_tail(rest)],
        [*middle, *infinitive_with_zu(clause.verb, to, link)],
    )


def _english_verbs(
    group: VerbGroup, subject: list[Word], frequency: list[Word], negated: bool, not_link: object, inverted: bool
) -> list[Word]:
    if group.auxiliary is None:
        return [*subject, *frequency, *group.lexical]
    word, links = group.auxiliary
    if negated and word == "can" and not inverted:
        return [*subject, ("cannot", (*links, not_link)), *frequency, *group.lexical]
    negation = [("not", (not_link,))] if negated else []
    start = [group.auxiliary, *subject] if inverted else [*subject, group.auxiliary]
    return [*start, *negation, *frequency, *group.lexical]


def _english_tail(rest: dict[str, Phrase]) -> list[Word]:
    return [word for name in ("quality", "manner", "place", "time", "content") for word in rest[name].english]


def _german_middle(
    clause: Clause, link: Links, objects: _Objects, rest: dict[str, Phrase], negation: list[Word]
) -> list[Word]:
    """What stands between the subject and the end of the clause."""
    reflexive = clause.verb is not None and clause.verb.reflexive
    return [
        *([(REFLEXIVES[person_of(clause.subject)], link)] if reflexive else []),
        *objects.pronouns,
        *rest["time"].german,
        *rest["frequency"].german,
        *objects.dative,
        *objects.accusative,
        *negation,
        *rest["manner"].german,
        *rest["place"].german,
        *objects.governed,
        *rest["quality"].german,
    ]


def _adjuncts(clause: Clause) -> dict[str, Phrase]:
    empty = Phrase([], [])
    phrases = {
        "time": adverbial(clause.time),
        "frequency": adverbial(clause.frequency),
        "manner": adverbial(clause.manner),
        "place": empty,
        "quality": empty,
        "content": empty,
    }
    if clause.place is not None:
        phrases["place"] = place_phrase(clause.place, spelled(clause.place.nominal, case_of(clause.place)))
    if clause.quality is not None:
        phrases["quality"] = _quality(clause.quality)
    if clause.content is not None:
        inner = content(clause.content)
        phrases["content"] = Phrase(inner.english, [COMMA, *inner.german])
    return phrases


def _quality(node: Quality) -> Phrase:
    link = new_link()
    if node.than is None:
        return Phrase([(node.adjective.english, link)], [(node.adjective.german, link)])
    than, other = new_link(), spelled(node.than, NOMINATIVE)
    return Phrase(
        [*((word, link) for word in node.adjective.comparative.split()), ("than", than), *other.english],
        [(node.adjective.german_comparative, link), ("als", than), *other.german],
    )


def _objects(clause: Clause, link: Links, negation: object | None, gap: str) -> _Objects:
    objects = _Objects()
    verb, node = clause.verb, clause.object
    if verb is None:
        return objects
    particle = [(verb.particle, link)] if verb.particle else []
    late = verb.moves and isinstance(node, Pronoun) and gap != "object" and not clause.passive
    if not late:
        objects.english += particle
    if clause.recipient is not None and not clause.recipient_last:
        _put_recipient(objects, clause.recipient, in_front=gap == "recipient", to=False)
    if node is not None:
        _put_object(objects, clause, node, link, negation, in_front=gap == "object")
    if late:
        objects.english += particle
    if clause.recipient is not None and clause.recipient_last:
        _put_recipient(objects, clause.recipient, in_front=gap == "recipient", to=True)
    return objects


def _put_object(
    objects: _Objects,
    clause: Clause,
    node: Nominal,
    link: Links,
    negation: object | None,
    *,
    in_front: bool,
) -> None:
    frame = clause.frame
    assert frame is not None
    if clause.passive:
        agent = prepositional("by", "von", spelled(node, DATIVE), new_link(), contracted=contracts(node))
        objects.put(objects.governed, agent, in_front=in_front)
        return
    if frame.name == "prep":
        links = new_link() if frame.english else link  # erinnert sich an: the preposition is part of the verb
        if isinstance(node, RelativePronoun):
            inner = relative_pronoun(node, frame.case, after_preposition=bool(frame.english))
        else:
            inner = spelled(node, frame.case)
        phrase = prepositional(frame.english, frame.german, inner, links, contracted=contracts(node))
        objects.put(objects.governed, phrase, in_front=in_front)
        return
    swallowed = negation is not None and isinstance(node, NounPhrase) and node.determiner in ("a", "")
    slot = objects.dative if frame.case == DATIVE else objects.accusative
    if isinstance(node, Pronoun):
        slot = objects.pronouns
    objects.put(slot, spelled(node, frame.case, negation if swallowed else None), in_front=in_front)
    objects.negated = swallowed


def _put_recipient(objects: _Objects, node: Nominal, *, in_front: bool, to: bool) -> None:
    """The preposition "to" is the dative in German: it is linked to the first word that shows it."""
    phrase = spelled(node, DATIVE)
    if to or in_front:
        phrase.english.insert(0, ("to", phrase.german[0][1]))
    slot = objects.pronouns if isinstance(node, Pronoun) else objects.dative
    objects.put(slot, phrase, in_front=in_front)
