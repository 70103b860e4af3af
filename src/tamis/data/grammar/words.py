"""The lexicon as records, read once from its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tamis.data.grammar import lexicon
from tamis.data.grammar.inflection import (
    ACCUSATIVE,
    DATIVE,
    DEFINITE,
    FEMININE,
    LIKE_DIESER,
    LIKE_EIN,
    MASCULINE,
    MIXED,
    NEUTER,
    PLURAL,
    STRONG,
    UNCHANGED,
    WEAK,
    Forms,
    Table,
    decline,
    inflected_stem,
    present,
    preterite,
    weak_participle,
    weak_preterite,
    with_ed,
    with_s,
)

GENDERS = {"der": MASCULINE, "die": FEMININE, "das": NEUTER}
CASES = {"acc": ACCUSATIVE, "dat": DATIVE}


@dataclass(frozen=True, slots=True)
class Noun:
    singular: str
    plural: str
    """Empty where the noun has none."""
    german: tuple[tuple[str, ...], tuple[str, ...]]
    """Cases of the singular, cases of the plural."""
    gender: int
    kinds: frozenset[str]
    modifier: str = ""
    """The first English word of a compound, which German writes as one word."""

    @property
    def lemma(self) -> str:
        return f"{self.modifier} {self.singular}".strip()

    def column(self, plural: bool) -> int:
        """Return the column of the tables of inflection."""
        return PLURAL if plural else self.gender


@dataclass(frozen=True, slots=True)
class Frame:
    """What a verb takes."""

    name: str
    """"acc", "dat", "give", "prep", "place", "at", "move", "none", "weather", "that", "ask" or "to"."""
    kinds: tuple[str, ...] = ()
    """Kinds of the object."""
    english: str = ""
    """Preposition of "prep"; empty where English takes a plain object."""
    german: str = ""
    case: int = ACCUSATIVE
    """Case of the object in German."""


@dataclass(frozen=True, slots=True)
class Verb:
    base: str
    third: str
    past: str
    participle: str
    particle: str
    moves: bool
    """Whether a pronoun stands before the particle: picks him up, but looks for him."""
    prefix: str
    infinitive: str
    """Without the prefix."""
    german_present: Forms
    german_past: Forms
    german_participle: str
    """With the prefix."""
    auxiliary: str
    """Auxiliary of the perfect: haben or sein."""
    reflexive: bool
    frames: tuple[Frame, ...]
    subjects: tuple[str, ...]

    @property
    def lemma(self) -> str:
        return f"{self.base} {self.particle}".strip()


@dataclass(frozen=True, slots=True)
class Adjective:
    english: str
    comparative: str
    german: str
    stem: str
    """What endings are added to."""
    german_comparative: str
    kinds: frozenset[str]


@dataclass(frozen=True, slots=True)
class Determiner:
    singular: str
    plural: str
    german: str
    """Stem; several words where English has several."""
    endings: Table
    adjectives: Table


@dataclass(frozen=True, slots=True)
class Adverbial:
    """Words with the number of the link they belong to."""

    english: tuple[tuple[str, int], ...]
    german: tuple[tuple[str, int], ...]
    tenses: tuple[str, ...]


def _rows(table: str) -> list[list[list[str]]]:
    return [[cell.split() for cell in line.split("|")] for line in table.strip().splitlines()]


def _noun(english: list[str], german: list[str], kinds: list[str]) -> Noun:
    gender = GENDERS[german[0]]
    nominative, genitive, plural = german[1], german[2 if gender != FEMININE else 1], german[-1]
    countable = plural != "-"
    return Noun(
        singular=english[0],
        plural=(english[1] if len(english) > 1 else with_s(english[0])) if countable else "",
        german=decline(nominative, genitive, plural if countable else "", gender),
        gender=gender,
        kinds=frozenset(kinds),
    )


def _compounds(nouns: dict[str, Noun]) -> list[Noun]:
    made = []
    for line in lexicon.COMPOUNDS.strip().splitlines():
        name, modifiers = line.split(" | ")
        head = nouns[name]
        for modifier in modifiers.split(", "):
            english, german = modifier.split()
            forms = tuple(tuple(german + form.lower() for form in number) for number in head.german)
            made.append(Noun(head.singular, head.plural, (forms[0], forms[1]), head.gender, head.kinds, english))
    return made


def _frame(text: str) -> Frame:
    name, *rest = text.split()
    if name == "prep":
        english, german, case, *kinds = rest
        return Frame(name, tuple(kinds), english.replace("-", ""), german, CASES[case])
    return Frame(name, tuple(rest), case=DATIVE if name == "dat" else ACCUSATIVE)


def _verb(english: list[str], german: list[str], frames: list[str], subjects: list[str]) -> Verb:
    particle = english.pop() if english[-1][0] in "+=" else ""
    base = english[0]
    past, participle = english[1:] if len(english) > 1 else (with_ed(base), with_ed(base))
    listed, *forms = [word for word in german if word not in ("sich", "ist")]
    prefix, _, infinitive = listed.rpartition("+")
    second, third = forms[:2] if len(forms) == 4 else ("", "")
    first_past, german_participle = forms[-2:] if forms else (weak_preterite(infinitive), weak_participle(infinitive))
    return Verb(
        base=base,
        third=with_s(base),
        past=past,
        participle=participle,
        particle=particle[1:],
        moves=particle.startswith("+"),
        prefix=prefix,
        infinitive=infinitive,
        german_present=IRREGULAR_PRESENT.get(infinitive) or present(infinitive, second, third),
        german_past=preterite(first_past),
        german_participle=prefix + german_participle,
        auxiliary="sein" if "ist" in german else "haben",
        reflexive="sich" in german,
        frames=tuple(_frame(frame) for frame in " ".join(frames).split(";")),
        subjects=tuple(subjects),
    )


def _adjective(english: list[str], german: list[str], kinds: list[str]) -> Adjective:
    word = english[0]
    comparative = english[1] if len(english) > 1 else word + ("r" if word.endswith("e") else "er")
    return Adjective(
        english=word,
        comparative=f"more {word}" if comparative == "-" else comparative,
        german=german[0],
        stem=inflected_stem(german[0]),
        german_comparative=german[1] if len(german) > 1 else german[0] + "er",
        kinds=frozenset(kinds),
    )


def _adverbial(english: list[str], german: list[str], tenses: Sequence[str] = ()) -> Adverbial:
    def numbered(words: list[str]) -> tuple[tuple[str, int], ...]:
        return tuple((word, int(number)) for word, number in (item.split(":") for item in words))

    return Adverbial(numbered(english), numbered(german), tuple(tenses))


IRREGULAR_PRESENT: dict[str, Forms] = {
    "wissen": ("weiß", "weißt", "weiß", "wissen", "wissen"),
    "mögen": ("mag", "magst", "mag", "mögen", "mögen"),
    "sein": ("bin", "bist", "ist", "sind", "sind"),
    "haben": ("habe", "hast", "hat", "haben", "haben"),
    "werden": ("werde", "wirst", "wird", "werden", "werden"),
    "können": ("kann", "kannst", "kann", "können", "können"),
    "müssen": ("muss", "musst", "muss", "müssen", "müssen"),
    "wollen": ("will", "willst", "will", "wollen", "wollen"),
    "sollen": ("sollte", "solltest", "sollte", "sollten", "sollten"),  # "should"
}
IRREGULAR_PAST: dict[str, Forms] = {
    "sein": preterite("war"),
    "werden": ("wurde", "wurdest", "wurde", "wurden", "wurden"),
    "können": preterite("konnte"),
    "müssen": preterite("musste"),
    "wollen": preterite("wollte"),
}

SIMPLE_NOUNS = {english[0]: _noun(english, german, kinds) for english, german, kinds in _rows(lexicon.NOUNS)}
COMPOUNDS = {noun.lemma: noun for noun in _compounds(SIMPLE_NOUNS)}
NOUNS = SIMPLE_NOUNS | COMPOUNDS
VERBS = [_verb(*row) for row in _rows(lexicon.VERBS)]
ADJECTIVES = {english[0]: _adjective(english, german, kinds) for english, german, kinds in _rows(lexicon.ADJECTIVES)}
TIMES = [_adverbial(*row) for row in _rows(lexicon.TIMES)]
FREQUENCIES = [_adverbial(*row) for row in _rows(lexicon.FREQUENCIES)]
MANNERS = [_adverbial(*row) for row in _rows(lexicon.MANNERS)]

DETERMINERS = {
    "the": Determiner("the", "the", "", DEFINITE, WEAK),
    "a": Determiner("a", "", "ein", LIKE_EIN, MIXED),
    "": Determiner("", "", "", UNCHANGED, STRONG),
    "not a": Determiner("a", "", "kein", LIKE_EIN, MIXED),
    "this": Determiner("this", "these", "dies", LIKE_DIESER, WEAK),
    "every": Determiner("every", "", "jed", LIKE_DIESER, WEAK),
    "which": Determiner("which", "which", "welch", LIKE_DIESER, WEAK),
    "many": Determiner("", "many", "viel", LIKE_DIESER, STRONG),
    "how many": Determiner("", "how many", "wie viel", LIKE_DIESER, STRONG),
    "whose": Determiner("whose", "whose", "wessen", UNCHANGED, STRONG),
    "whose (his)": Determiner("whose", "whose", "dessen", UNCHANGED, STRONG),
    "whose (her)": Determiner("whose", "whose", "deren", UNCHANGED, STRONG),
    **{
        english: Determiner("", english, german, UNCHANGED, STRONG)
        for english, german in (("two", "zwei"), ("three", "drei"), ("four", "vier"), ("ten", "zehn"))
    },
    **{
        english: Determiner(english, english, german, LIKE_EIN, MIXED)
        for english, german in (
            ("my", "mein"),
            ("your", "dein"),
            ("his", "sein"),
            ("her", "ihr"),
            ("our", "unser"),
            ("their", "ihr"),
        )
    },
}
