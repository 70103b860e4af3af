"""The trees of the grammar: what is said, before either language orders and inflects it."""

from __future__ import annotations

from dataclasses import dataclass

from tamis.data.grammar.inflection import DU, ER, ICH, SIE, WIR
from tamis.data.grammar.words import Adjective, Adverbial, Frame, Noun, Verb


@dataclass(frozen=True, slots=True)
class Pronoun:
    word: str
    """"I", "you", "he", "she", "we", "they", "it", and the interrogatives "who" and "what"."""


@dataclass(frozen=True, slots=True)
class Name:
    name: str


@dataclass(frozen=True, slots=True)
class RelativePronoun:
    """Stands for the noun that its clause describes."""

    noun: Noun
    plural: bool


@dataclass(slots=True)
class NounPhrase:
    noun: Noun
    determiner: str = "the"
    """A key of words.DETERMINERS."""
    plural: bool = False
    adjectives: tuple[Adjective, ...] = ()
    possessor: NounPhrase | Name | None = None
    before: bool = False
    """Whether English has the possessor before the noun: the man's dog, not the dog of the man."""
    place: Place | None = None
    relative: Relative | None = None


@dataclass(frozen=True, slots=True)
class Both:
    """Two nominals joined by "and"."""

    first: NounPhrase | Name
    second: NounPhrase | Name


Nominal = Pronoun | Name | RelativePronoun | NounPhrase | Both


@dataclass(frozen=True, slots=True)
class Place:
    preposition: str
    """A key of phrases.PREPOSITIONS."""
    nominal: Nominal
    towards: bool = False
    """A direction, for which German has the accusative, not a location with the dative."""


@dataclass(frozen=True, slots=True)
class Quality:
    """What the subject is: old, or older than somebody."""

    adjective: Adjective
    than: Nominal | None = None


@dataclass(frozen=True, slots=True)
class Content:
    """A clause that is the object of a verb."""

    opening: str
    """"that", "whether", "to", or an interrogative."""
    clause: Clause


@dataclass(slots=True)
class Clause:
    subject: Nominal
    verb: Verb | None = None
    """None with a quality."""
    frame: Frame | None = None
    """The one of the verb's frames that is used."""
    object: Nominal | None = None
    """The object; in a passive clause, by whom."""
    recipient: Nominal | None = None
    recipient_last: bool = False
    """gives the book to the man, not gives the man the book."""
    quality: Quality | None = None
    tense: str = "present"
    """"present", "past", "perfect" or "future"."""
    modal: str = ""
    """A key of clauses.MODALS."""
    passive: bool = False
    negated: bool = False
    opening: Adverbial | None = None
    """Stands first; in German the subject then follows the verb."""
    time: Adverbial | None = None
    frequency: Adverbial | None = None
    manner: Adverbial | None = None
    place: Place | None = None
    content: Content | None = None


@dataclass(frozen=True, slots=True)
class Relative:
    clause: Clause
    gap: str = "subject"
    """Which of its parts the relative pronoun is: "subject", "object" or "recipient"."""


@dataclass(frozen=True, slots=True)
class Statement:
    clause: Clause


@dataclass(frozen=True, slots=True)
class Question:
    """One of yes and no unless an interrogative opens it, or a part of the clause is one."""

    clause: Clause
    interrogative: str = ""
    """"where", "where to", "when", "why" or "how"."""
    gap: str = ""
    """The part that holds who, what or which: "subject", "object" or "recipient"."""


@dataclass(frozen=True, slots=True)
class Subordination:
    main: Clause
    conjunction: str
    """A key of sentences.CONJUNCTIONS."""
    subordinate: Clause
    subordinate_first: bool = False


@dataclass(frozen=True, slots=True)
class Coordination:
    first: Clause
    conjunction: str
    second: Clause


Sentence = Statement | Question | Subordination | Coordination


def person_of(nominal: Nominal) -> int:
    """Which form of the verb a subject takes."""
    match nominal:
        case Pronoun(word):
            return PERSONS.get(word, ER)
        case Both():
            return SIE
        case NounPhrase() | RelativePronoun():
            return SIE if nominal.plural else ER
    return ER


PERSONS = {"I": ICH, "you": DU, "we": WIR, "they": SIE}
