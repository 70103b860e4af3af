"""Random sentences: which clauses there are and how often each comes."""

from __future__ import annotations

from functools import cache
from typing import TypeGuard

from tamis.data.grammar.draws import Draws, Weighted
from tamis.data.grammar.inflection import FEMININE
from tamis.data.grammar.nominals import DENIABLE, INTERROGATIVES, NominalSampler, adjectives_of
from tamis.data.grammar.syntax import (
    Clause,
    Content,
    Coordination,
    Nominal,
    NounPhrase,
    Pronoun,
    Quality,
    Question,
    Relative,
    RelativePronoun,
    Sentence,
    Statement,
    Subordination,
)
from tamis.data.grammar.words import FREQUENCIES, MANNERS, TIMES, VERBS, Adverbial, Frame, Noun, Verb

SENTENCES = Weighted({"statement": 47, "question": 21, "subordination": 17, "content": 12, "coordination": 3})
FRAMES = Weighted(
    {"acc": 42, "place": 11, "at": 3, "dat": 9, "give": 9, "prep": 9, "move": 8, "quality": 8, "none": 3, "passive": 7}
)
TENSES = Weighted({"present": 46, "past": 25, "perfect": 11, "future": 6, "modal": 12})
MODALS = Weighted({"can": 4, "must": 3, "want": 3, "should": 2})
CONJUNCTIONS = Weighted({"because": 7, "although": 3, "while": 3, "if": 4, "when": 4, "before": 2})
QUESTIONS = Weighted({"yes or no": 30, "subject": 15, "object": 24, "recipient": 5, "adverb": 26})
ASKED = Weighted({"acc": 5, "dat": 2, "prep": 2})
ADVERBS = Weighted({"why": 3, "when": 2, "where": 2, "where to": 1, "how": 1})
CONTENTS = Weighted({"that": 5, "ask": 4, "to": 4})
OPENINGS = Weighted({"whether": 3, "why": 2, "where": 2, "when": 1})
INFINITIVES = Weighted({"acc": 6, "dat": 2, "give": 2, "prep": 1, "place": 1, "move": 1, "none": 1})
GAPS = Weighted({"subject": 10, "object": 8, "whose": 2, "recipient": 1})
GAPS_OF_THINGS = Weighted({"object": 3, "passive": 1, "quality": 1})
# How often a place is named, by frame.
PLACED = {"at": 1.0, "place": 0.5, "acc": 0.12, "prep": 0.08}
PEOPLE = ("person", "animal")
THINGS = ("thing", "food", "vehicle")
MASS = frozenset({"food", "drink"})


@cache
def verbs_of(
    frame: str, subjects: frozenset[str] = frozenset(), objects: frozenset[str] = frozenset()
) -> list[tuple[Verb, Frame]]:
    """Verbs that have a frame, and that nouns of these kinds may be subject or object of."""
    return [
        (verb, own)
        for verb in VERBS
        for own in verb.frames
        if own.name == frame
        and (not subjects or subjects.intersection(verb.subjects))
        and (not objects or objects.intersection(own.kinds))
    ]


@cache
def times_of(tense: str, negated: bool) -> list[Adverbial]:
    """Not every day is another thing than every day not."""
    return [time for time in TIMES if tense in time.tenses and not (negated and time.english[0][0] == "every")]


class Sampler:
    """Draws sentences."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.nominals = NominalSampler(draws)

    def sentence(self) -> Sentence:
        match self.draws.weighted(SENTENCES):
            case "statement":
                return Statement(self._with_time(self._clause(rich=True), opening=0.25))
            case "question":
                return self._question()
            case "subordination":
                return self._subordination()
            case "content":
                return Statement(self._with_content())
        tense = self._simple_tense()
        first, second = self._clause(tense=tense), self._clause(tense=tense)
        return Coordination(first, self.draws.pick(("and", "but")), second)

    # Clauses

    def _clause(
        self,
        *,
        frame: str = "",
        tense: str = "",
        subject: Nominal | None = None,
        kinds: frozenset[str] = frozenset(),
        rich: bool = False,
    ) -> Clause:
        """A clause without a time.  `kinds` are those of a given subject; `rich` adds relative clauses."""
        frame = frame or self.draws.weighted(FRAMES)
        clause = self._start(frame, tense)
        if frame == "quality":
            return self._quality(clause, subject, kinds, rich)
        if frame == "passive":
            return self._passive(clause, subject, kinds, rich)
        # Some frames are for people only; there is always a place to be.
        verb, own = self._verb(clause, verbs_of(frame, subjects=kinds) or verbs_of("place", subjects=kinds))
        return self._active(clause, verb, own, subject, rich=rich)

    def _verb(self, clause: Clause, verbs: list[tuple[Verb, Frame]]) -> tuple[Verb, Frame]:
        """One that shows its tense: "they read" is present."""
        hidden = clause.tense == "past" and not clause.modal
        return self.draws.pick([found for found in verbs if not hidden or found[0].past != found[0].base])

    def _simple_tense(self) -> str:
        return "past" if self.draws.chance(0.4) else "present"

    def _start(self, frame: str, tense: str) -> Clause:
        """Tense, modal and negation; the rest is to come."""
        clause = Clause(Pronoun("it"), tense=tense or self.draws.weighted(TENSES))
        if clause.tense == "modal":
            clause.tense = self._simple_tense()
            if frame not in ("quality", "passive"):
                clause.modal = self.draws.weighted(MODALS)
                clause.tense = "present" if clause.modal == "should" else clause.tense
        elif frame == "passive" or (frame == "quality" and clause.tense == "perfect"):
            clause.tense = "past" if clause.tense in ("past", "perfect") else "present"
        # "must not" forbids, muss nicht allows
        clause.negated = clause.modal != "must" and self.draws.chance(0.13)
        return clause

    def _active(
        self,
        clause: Clause,
        verb: Verb,
        frame: Frame,
        subject: Nominal | None = None,
        *,
        object: Nominal | None = None,
        rich: bool = False,
    ) -> Clause:
        clause.verb, clause.frame = verb, frame
        clause.subject = subject or self._subject(verb.subjects, rich)
        clause.object = object
        if object is None and frame.kinds:
            clause.object = self._object(clause, verb, frame, rich)
        if frame.name == "give":
            self._add_recipient(clause)
        if not _described(clause.object):  # what came after it would belong to the relative clause
            self._add_adverbs(clause, frame.name)
        return clause

    def _quality(self, clause: Clause, subject: Nominal | None, kinds: frozenset[str], rich: bool) -> Clause:
        if subject is None:
            subject = self._subject(PEOPLE if self.draws.chance(0.6) else THINGS, rich)
        clause.subject = subject
        noun = _noun_of(subject)
        kinds = noun.kinds if noun is not None else kinds or frozenset(("person",))
        adjective = self.draws.pick(adjectives_of(kinds))
        than = None
        if self.draws.chance(0.35):
            than = self.nominals.noun_phrase(tuple(sorted(kinds)), adjective=0.0)
        clause.quality = Quality(adjective, than)
        return clause

    def _passive(self, clause: Clause, subject: Nominal | None, kinds: frozenset[str], rich: bool) -> Clause:
        clause.passive = True
        clause.verb, clause.frame = self.draws.pick(verbs_of("acc", objects=kinds))
        clause.subject = subject or self._subject(clause.frame.kinds, rich)
        if self.draws.chance(0.6):
            clause.object = self.nominals.nominal(clause.verb.subjects, simple=True)
        return clause

    def _subject(self, kinds: tuple[str, ...], rich: bool) -> Nominal:
        subject = self.nominals.nominal(kinds, pronouns=0.3)
        if rich and _bare(subject):
            if self.draws.chance(0.1):
                self._describe(subject)
            elif self.draws.chance(0.05):
                subject.place = self.nominals.place(towards=False)
        return subject

    def _object(self, clause: Clause, verb: Verb, frame: Frame, rich: bool) -> Nominal:
        if clause.negated:
            node: Nominal = self.nominals.noun_phrase(frame.kinds, DENIABLE)
        else:
            pronouns = 0.0 if frame.name == "give" else 0.25
            node = self.nominals.nominal(frame.kinds, pronouns=pronouns, beside=clause.subject)
        if rich and frame.name != "give" and _bare(node) and self.draws.chance(0.1):
            self._describe(node)
        return node

    def _add_recipient(self, clause: Clause) -> None:
        clause.recipient = self.nominals.nominal(("person",), pronouns=0.3, simple=True, beside=clause.subject)
        bare = isinstance(clause.object, NounPhrase) and clause.object.determiner == ""
        clause.recipient_last = bare or self.draws.chance(0.4)  # "gives her books" would say two things
        if clause.negated and isinstance(clause.recipient, NounPhrase):
            clause.recipient.determiner = "the"

    def _add_adverbs(self, clause: Clause, frame: str) -> None:
        if frame == "move":
            if self.draws.chance(0.85):
                clause.place = self.nominals.place(towards=True)
        elif self.draws.chance(PLACED.get(frame, 0.0)):
            clause.place = self.nominals.place(towards=False)
        elif frame == "place" and self.draws.chance(0.3):
            clause.place = self.nominals.company(clause.subject)
        if frame in ("move", "place") and self.draws.chance(0.15):
            clause.manner = self.draws.pick(MANNERS)
        # After a relative clause, "often" could belong to either verb.
        if not clause.negated and not _described(clause.subject) and self.draws.chance(0.08):
            clause.frequency = self.draws.pick(FREQUENCIES)

    def _with_time(self, clause: Clause, *, opening: float = 0.0, closing: float = 0.13) -> Clause:
        """Add when it happens, unless that would read as part of a clause within the clause."""
        if clause.frequency is not None:
            return clause
        times = times_of(clause.tense, clause.negated)
        if self.draws.chance(opening):
            clause.opening = self.draws.pick(times)
        elif clause.content is None and not _described(clause.object) and self.draws.chance(closing):
            clause.time = self.draws.pick(times)
        return clause

    def _describe(self, phrase: NounPhrase) -> None:
        """Add a relative clause."""
        noun, tense = phrase.noun, self._simple_tense()
        pronoun = RelativePronoun(noun, phrase.plural)
        gap = self.draws.weighted(GAPS if noun.kinds.intersection(PEOPLE) else GAPS_OF_THINGS)
        if gap == "recipient" and "person" in noun.kinds:
            clause = self._active(self._start("give", tense), *self.draws.pick(verbs_of("give")))
            clause.recipient = pronoun
        elif gap == "object":
            frame = "acc" if "person" not in noun.kinds else self.draws.weighted(ASKED)
            start = self._start(frame, tense)
            clause = self._active(start, *self._verb(start, verbs_of(frame, objects=noun.kinds)), object=pronoun)
        elif gap == "whose":
            owned = self.nominals.noun_phrase(PEOPLE)
            feminine = phrase.plural or noun.gender == FEMININE
            owned.determiner = "whose (her)" if feminine else "whose (his)"
            clause, gap = self._clause(tense=tense, subject=owned, kinds=owned.noun.kinds), "subject"
        else:
            frame = "" if gap in ("subject", "recipient") else gap
            clause, gap = self._clause(frame=frame, tense=tense, subject=pronoun, kinds=noun.kinds), "subject"
        phrase.relative = Relative(self._with_time(clause, closing=0.06), gap)

    # Sentences

    def _subordination(self) -> Subordination:
        conjunction = self.draws.weighted(CONJUNCTIONS)
        tense = {"when": "past", "if": "present"}.get(conjunction, "")
        main = self._clause(tense=tense or self._simple_tense())
        weather = conjunction != "before" and self.draws.chance(0.12)
        if weather:
            subordinate = self._clause(frame="weather", tense=main.tense, subject=Pronoun("it"))
        else:
            subordinate = self._clause(tense=main.tense)
        first = self.draws.chance(0.35)
        main = self._with_time(main, opening=0.0 if first else 0.1, closing=0.05)
        return Subordination(main, conjunction, self._with_time(subordinate, closing=0.05), first)

    def _with_content(self) -> Clause:
        """A clause whose object is a clause."""
        kind = self.draws.weighted(CONTENTS)
        clause = self._clause(frame=kind)
        clause.frequency = None
        if kind == "to":
            inner = Clause(clause.subject)
            inner = self._active(inner, *self.draws.pick(verbs_of(self.draws.weighted(INFINITIVES))), clause.subject)
            inner.frequency = None
            clause.content = Content("to", self._with_time(inner, closing=0.05))
        elif kind == "that":
            clause.content = Content("that", self._with_time(self._clause()))
        else:
            opening = self.draws.weighted(OPENINGS)
            clause.content = Content(opening, self._asked(opening))
        return self._with_time(clause, opening=0.15)

    def _asked(self, adverb: str) -> Clause:
        """A clause that leaves out what the interrogative asks for."""
        frame = {"where": self.draws.pick(("place", "at")), "where to": "move", "how": "place"}.get(adverb, "")
        clause = self._clause(frame=frame)
        if adverb.startswith("where"):
            clause.place = clause.manner = None
        if adverb == "how":
            clause.manner = None
        if adverb not in ("why", "whether"):
            clause.negated, clause.frequency = False, None
        return clause if adverb == "when" else self._with_time(clause, closing=0.08)

    def _question(self) -> Question:
        kind = self.draws.weighted(QUESTIONS)
        if kind == "yes or no":
            return Question(self._with_time(self._clause(rich=self.draws.chance(0.5))))
        if kind == "adverb":
            adverb = self.draws.weighted(ADVERBS)
            return Question(self._asked(adverb), interrogative=adverb)
        if kind == "subject":
            subject = self._asked_nominal(PEOPLE, "who")
            noun = _noun_of(subject)
            kinds = noun.kinds if noun is not None else frozenset(("person",))
            clause = self._clause(subject=subject, kinds=kinds, rich=True)
        elif kind == "recipient":
            clause = self._active(self._start("give", ""), *self.draws.pick(verbs_of("give")))
            clause.recipient = self._asked_nominal(("person",), "who")
        else:
            clause = self._question_of_object()
        return Question(self._with_time(clause), gap=kind)

    def _question_of_object(self) -> Clause:
        frame = self.draws.weighted(ASKED)
        start = self._start(frame, "")
        objects = frozenset(("person",)) if frame == "prep" else frozenset()
        verb, own = self._verb(start, verbs_of(frame, objects=objects))
        word = "who" if frame != "acc" or ("person" in own.kinds and self.draws.chance(0.5)) else "what"
        asked = self._asked_nominal(("person",) if word == "who" else own.kinds, word)
        return self._active(start, verb, own, object=asked)

    def _asked_nominal(self, kinds: tuple[str, ...], word: str) -> Nominal:
        """An interrogative pronoun, or which, whose or how many of something."""
        if MASS.intersection(kinds) or self.draws.chance(0.55):
            return Pronoun(word)
        return self.nominals.noun_phrase(kinds, INTERROGATIVES, adjective=0.2)


def _noun_of(node: Nominal) -> Noun | None:
    return node.noun if isinstance(node, NounPhrase) else None


def _bare(node: Nominal) -> TypeGuard[NounPhrase]:
    """Whether a relative clause could only belong to its noun."""
    return isinstance(node, NounPhrase) and node.possessor is None


def _described(node: Nominal | None) -> bool:
    return isinstance(node, NounPhrase) and node.relative is not None
