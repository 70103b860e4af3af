"""Random noun phrases and places."""

from __future__ import annotations

from functools import cache

from tamis.data.grammar.draws import Draws, Weighted
from tamis.data.grammar.lexicon import NAMES
from tamis.data.grammar.syntax import Both, Name, Nominal, NounPhrase, Place, Pronoun
from tamis.data.grammar.words import ADJECTIVES, COMPOUNDS, SIMPLE_NOUNS, Adjective, Noun

POSSESSIVES = ("my", "your", "his", "her", "our", "their")
NUMBERS = ("two", "three", "four", "ten")
# A determiner and whether the noun is plural.
DETERMINERS = Weighted(
    {
        ("the", False): 36,
        ("the", True): 11,
        ("a", False): 15,
        ("", True): 6,
        ("possessive", False): 11,
        ("possessive", True): 4,
        ("this", False): 5,
        ("this", True): 2,
        ("number", True): 4,
        ("every", False): 3,
        ("many", True): 3,
    }
)
# "not" meets no number and no "every": which of the two is denied would not be clear.
DENIABLE = Weighted({("the", False): 5, ("the", True): 2, ("a", False): 3, ("", True): 1, ("possessive", False): 2})
UNCOUNTABLE = Weighted({("", False): 3, ("the", False): 2, ("possessive", False): 1})
DEFINITE = Weighted({("the", False): 5, ("possessive", False): 2, ("this", False): 1})
PLACES = Weighted({("the", False): 10, ("the", True): 1, ("a", False): 2, ("possessive", False): 2, ("this", False): 1})
INTERROGATIVES = Weighted({("which", False): 5, ("which", True): 2, ("how many", True): 2, ("whose", False): 2})
PRONOUNS = ("I", "you", "he", "she", "we", "they")
THIRD = ("he", "she", "they")
# The pronouns that may stand beside a subject.
OTHERS = {"I": ("you", *THIRD), "we": ("you", *THIRD), "you": ("I", "we", *THIRD)}
LOCATIONS = Weighted({"in": 9, "on": 4, "under": 2, "behind": 2, "beside": 2, "in front of": 2})
DIRECTIONS = Weighted({"into": 5, "onto": 2, "to": 4, "from": 2, "behind": 1, "under": 1, "in front of": 1})
GROUNDS = {
    "in": ("place",),
    "into": ("place",),
    "from": ("place",),
    "on": ("surface",),
    "onto": ("surface",),
    "to": ("place", "landmark"),
}
ANYWHERE = ("place", "landmark", "furniture", "opening", "vehicle")


@cache
def nouns_of(kinds: tuple[str, ...]) -> tuple[list[Noun], list[Noun]]:
    """Simple nouns and compounds of any of the kinds."""
    wanted = set(kinds)
    simple = [noun for noun in SIMPLE_NOUNS.values() if wanted & noun.kinds]
    return simple, [noun for noun in COMPOUNDS.values() if wanted & noun.kinds]


@cache
def adjectives_of(kinds: frozenset[str]) -> list[Adjective]:
    return [adjective for adjective in ADJECTIVES.values() if adjective.kinds & kinds]


class NominalSampler:
    """Draws noun phrases and places."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws

    def noun(self, kinds: tuple[str, ...]) -> Noun:
        simple, compounds = nouns_of(kinds)
        if compounds and self.draws.chance(0.2):
            return self.draws.pick(compounds)
        return self.draws.pick(simple)

    def nominal(
        self, kinds: tuple[str, ...], *, pronouns: float = 0.0, simple: bool = False, beside: Nominal | None = None
    ) -> Nominal:
        """Draw a nominal of any form; `simple` leaves out two nominals joined and those with more nominals inside.

        `beside` is the subject, which a pronoun here may not mean too: "I see myself" is not in the grammar.
        """
        if "person" in kinds:
            if self.draws.chance(pronouns):
                subject = beside.word if isinstance(beside, Pronoun) else ""
                return Pronoun(self.draws.pick(OTHERS.get(subject, PRONOUNS)))
            if self.draws.chance(0.07):
                return Name(self.draws.pick(NAMES))
        phrase = self.noun_phrase(kinds)
        if simple:
            return phrase
        if self.draws.chance(0.05):
            other = self.noun_phrase(kinds)
            return Both(phrase, other) if other.noun is not phrase.noun else phrase
        if self.draws.chance(0.09):
            self.add_possessor(phrase)
        return phrase

    def noun_phrase(
        self, kinds: tuple[str, ...], determiners: Weighted[tuple[str, bool]] = DETERMINERS, adjective: float = 0.28
    ) -> NounPhrase:
        noun = self.noun(kinds)
        determiner, plural = self.draws.weighted(determiners if noun.plural else UNCOUNTABLE)
        if determiner == "possessive":
            determiner = self.draws.pick(POSSESSIVES)
        elif determiner == "number":
            determiner = self.draws.pick(NUMBERS)
        phrase = NounPhrase(noun, determiner, plural)
        if self.draws.chance(adjective):
            phrase.adjectives = (self.draws.pick(adjectives_of(noun.kinds)),)
        return phrase

    def add_possessor(self, phrase: NounPhrase) -> None:
        """the man's dog, the dog of the man, Anna's dog; the article becomes "the"."""
        if not phrase.noun.plural:
            return
        phrase.determiner = "the"
        if self.draws.chance(0.25):
            phrase.possessor, phrase.before = Name(self.draws.pick(NAMES)), True
            return
        owner = self.noun_phrase(("person",), DEFINITE, adjective=0.15)
        phrase.possessor, phrase.before = owner, self.draws.chance(0.5)

    def place(self, *, towards: bool) -> Place:
        preposition = self.draws.weighted(DIRECTIONS if towards else LOCATIONS)
        phrase = self.noun_phrase(GROUNDS.get(preposition, ANYWHERE), PLACES, adjective=0.15)
        return Place(preposition, phrase, towards)

    def company(self, subject: Nominal) -> Place:
        """with the man, without her."""
        preposition = self.draws.pick(("with", "without"))
        return Place(preposition, self.nominal(("person", "animal"), pronouns=0.3, simple=True, beside=subject))
