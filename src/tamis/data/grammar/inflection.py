"""The endings of German and English."""

from __future__ import annotations

# Rows of every table are cases, columns are the three genders and the plural.
NOMINATIVE, ACCUSATIVE, DATIVE, GENITIVE = range(4)
MASCULINE, FEMININE, NEUTER, PLURAL = range(4)

Table = tuple[tuple[str, str, str, str], ...]


def _table(text: str) -> Table:
    rows = (line.replace("-", "").split(",") for line in text.split("/"))
    return tuple((row[0].strip(), row[1].strip(), row[2].strip(), row[3].strip()) for row in rows)


WEAK = _table("-e, -e, -e, -en / -en, -e, -e, -en / -en, -en, -en, -en / -en, -en, -en, -en")
"""Endings of adjectives after der, dieser, jeder, welcher."""
MIXED = _table("-er, -e, -es, -en / -en, -e, -es, -en / -en, -en, -en, -en / -en, -en, -en, -en")
"""Endings of adjectives after ein, kein, mein."""
STRONG = _table("-er, -e, -es, -e / -en, -e, -es, -e / -em, -er, -em, -en / -en, -er, -en, -er")
"""Endings of adjectives after no article, a number, viele or a genitive."""
DEFINITE = _table("der, die, das, die / den, die, das, die / dem, der, dem, den / des, der, des, der")
LIKE_DIESER = _table("-er, -e, -es, -e / -en, -e, -es, -e / -em, -er, -em, -en / -es, -er, -es, -er")
LIKE_EIN = _table("-, -e, -, -e / -en, -e, -, -e / -em, -er, -em, -en / -es, -er, -es, -er")
UNCHANGED = _table("-, -, -, - / -, -, -, - / -, -, -, - / -, -, -, -")
RELATIVE = _table("der, die, das, die / den, die, das, die / dem, der, dem, denen / dessen, deren, dessen, deren")

# Persons: the index into every tuple of verb forms.
ICH, DU, ER, WIR, SIE = range(5)
Forms = tuple[str, str, str, str, str]

_VOWELS = "aeiouäöü"
_UNSTRESSED = ("be", "emp", "ent", "er", "ver", "zer")


def decline(singular: str, genitive: str, plural: str, gender: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The four cases of a German noun in the singular and in the plural."""
    if gender == MASCULINE and genitive.endswith("n"):  # der Junge, den Jungen
        cases = (singular, genitive, genitive, genitive)
    else:
        cases = (singular, singular, singular, genitive)
    dative = plural if not plural or plural.endswith(("n", "s")) else plural + "n"
    return cases, (plural, plural, dative, plural)


def inflected_stem(adjective: str) -> str:
    """What an ending is added to: teuer gives teur-, dunkel gives dunkl-, müde gives müd-."""
    if adjective.endswith("e"):
        return adjective[:-1]
    if adjective.endswith("el") or adjective.endswith(("auer", "euer")):
        return adjective[:-2] + adjective[-1]
    return adjective


def stem_of(infinitive: str) -> str:
    return infinitive[:-1] if infinitive.endswith(("ern", "eln")) else infinitive[:-2]


def _needs_e(stem: str) -> bool:
    """Whether an e keeps stem and ending apart: arbeit-e-t, öffn-e-t; but wohn-t, träum-t."""
    if stem[-1] in "td":
        return True
    before = stem[-2]
    lengthened = before == "h" and stem[-3] in _VOWELS
    return stem[-1] in "nm" and before not in _VOWELS + "lrmn" and not lengthened


def present(infinitive: str, second: str = "", third: str = "") -> Forms:
    """Present tense; `second` and `third` are the forms of du and er where the vowel changes."""
    stem = stem_of(infinitive)
    link = "e" if _needs_e(stem) else ""
    du = stem + ("t" if stem[-1] in "sßzx" else link + "st")
    return stem + "e", second or du, third or stem + link + "t", infinitive, infinitive


def weak_preterite(infinitive: str) -> str:
    stem = stem_of(infinitive)
    return stem + ("ete" if _needs_e(stem) else "te")


def preterite(first: str) -> Forms:
    """Past tense from the form of ich: sah, or weak and mixed ones in -te."""
    if first.endswith("te"):
        return first, first + "st", first, first + "n", first + "n"
    du = first + ("est" if first[-1] in "tdsßz" else "st")
    return first, du, first, first + "en", first + "en"


def weak_participle(infinitive: str) -> str:
    stem = stem_of(infinitive)
    ending = "et" if _needs_e(stem) else "t"
    bare = infinitive.startswith(_UNSTRESSED) or infinitive.endswith("ieren")
    return ("" if bare else "ge") + stem + ending


def with_s(word: str) -> str:
    """The English plural, and the third person: dogs, boxes, cities."""
    if word.endswith(("s", "x", "z", "ch", "sh", "o")):
        return word + "es"
    if word.endswith("y") and word[-2] not in _VOWELS:
        return word[:-1] + "ies"
    return word + "s"


def with_ed(word: str) -> str:
    """The past of a regular English verb."""
    if word.endswith("e"):
        return word + "d"
    if word.endswith("y") and word[-2] not in _VOWELS:
        return word[:-1] + "ied"
    return word + "ed"


def indefinite_article(following: str) -> str:
    """By spelling, which holds for every word of the lexicon."""
    return "an" if following[0] in "aeiou" else "a"
