"""Paradigms, written out by hand."""

import pytest

from tamis.data.grammar import generate
from tamis.data.grammar.inflection import DEFINITE, indefinite_article, with_ed, with_s
from tamis.data.grammar.phrases import nominal
from tamis.data.grammar.syntax import NounPhrase
from tamis.data.grammar.words import ADJECTIVES, NOUNS, VERBS

# Determiner, adjective, noun, plural: nominative, accusative, dative and genitive.
DECLENSIONS = [
    ("the", "old", "dog", False, "der alte Hund | den alten Hund | dem alten Hund | des alten Hundes"),
    ("the", "young", "cat", False, "die junge Katze | die junge Katze | der jungen Katze | der jungen Katze"),
    ("the", "new", "book", False, "das neue Buch | das neue Buch | dem neuen Buch | des neuen Buches"),
    ("the", "poor", "child", True, "die armen Kinder | die armen Kinder | den armen Kindern | der armen Kinder"),
    ("a", "old", "dog", False, "ein alter Hund | einen alten Hund | einem alten Hund | eines alten Hundes"),
    ("a", "young", "cat", False, "eine junge Katze | eine junge Katze | einer jungen Katze | einer jungen Katze"),
    ("a", "new", "book", False, "ein neues Buch | ein neues Buch | einem neuen Buch | eines neuen Buches"),
    (
        "my",
        "good",
        "friend",
        True,
        "meine guten Freunde | meine guten Freunde | meinen guten Freunden | meiner guten Freunde",
    ),
    (
        "our",
        "small",
        "house",
        False,
        "unser kleines Haus | unser kleines Haus | unserem kleinen Haus | unseres kleinen Hauses",
    ),
    ("", "cold", "wine", False, "kalter Wein | kalten Wein | kaltem Wein | kalten Weines"),
    ("", "warm", "milk", False, "warme Milch | warme Milch | warmer Milch | warmer Milch"),
    ("", "fresh", "bread", False, "frisches Brot | frisches Brot | frischem Brot | frischen Brotes"),
    ("", "big", "tree", True, "große Bäume | große Bäume | großen Bäumen | großer Bäume"),
    ("two", "red", "car", True, "zwei rote Autos | zwei rote Autos | zwei roten Autos | zwei roter Autos"),
    (
        "many",
        "old",
        "key",
        True,
        "viele alte Schlüssel | viele alte Schlüssel | vielen alten Schlüsseln | vieler alter Schlüssel",
    ),
    (
        "this",
        "expensive",
        "hat",
        False,
        "dieser teure Hut | diesen teuren Hut | diesem teuren Hut | dieses teuren Hutes",
    ),
    (
        "this",
        "dark",
        "room",
        True,
        "diese dunklen Zimmer | diese dunklen Zimmer | diesen dunklen Zimmern | dieser dunklen Zimmer",
    ),
    ("every", "tired", "boy", False, "jeder müde Junge | jeden müden Jungen | jedem müden Jungen | jedes müden Jungen"),
    (
        "her",
        "clever",
        "student",
        False,
        "ihr kluger Student | ihren klugen Studenten | ihrem klugen Studenten | ihres klugen Studenten",
    ),
    (
        "which",
        "new",
        "church",
        False,
        "welche neue Kirche | welche neue Kirche | welcher neuen Kirche | welcher neuen Kirche",
    ),
    (
        "the",
        "big",
        "kitchen window",
        True,
        "die großen Küchenfenster | die großen Küchenfenster | den großen Küchenfenstern | der großen Küchenfenster",
    ),
]

# English base and particle, first frame: ich, du, er, wir; past of ich, du, wir; participle.
CONJUGATIONS = [
    ("see", "acc", "sehe siehst sieht sehen sah sahst sahen gesehen"),
    ("find", "acc", "finde findest findet finden fand fandest fanden gefunden"),
    ("open", "acc", "öffne öffnest öffnet öffnen öffnete öffnetest öffneten geöffnet"),
    ("draw", "acc", "zeichne zeichnest zeichnet zeichnen zeichnete zeichnetest zeichneten gezeichnet"),
    ("close", "acc", "schließe schließt schließt schließen schloss schlossest schlossen geschlossen"),
    ("feed", "acc", "füttere fütterst füttert füttern fütterte füttertest fütterten gefüttert"),
    ("visit", "acc", "besuche besuchst besucht besuchen besuchte besuchtest besuchten besucht"),
    ("take", "acc", "nehme nimmst nimmt nehmen nahm nahmst nahmen genommen"),
    ("eat", "acc", "esse isst isst essen aß aßest aßen gegessen"),
    ("invite", "acc", "lade lädst lädt laden lud ludest luden eingeladen"),
    ("pick up", "acc", "hole holst holt holen holte holtest holten abgeholt"),
    ("look at", "acc", "schaue schaust schaut schauen schaute schautest schauten angeschaut"),
    ("help", "dat", "helfe hilfst hilft helfen half halfst halfen geholfen"),
    ("answer", "dat", "antworte antwortest antwortet antworten antwortete antwortetest antworteten geantwortet"),
    ("bring", "give", "bringe bringst bringt bringen brachte brachtest brachten gebracht"),
    ("dance", "place", "tanze tanzt tanzt tanzen tanzte tanztest tanzten getanzt"),
    ("live", "at", "wohne wohnst wohnt wohnen wohnte wohntest wohnten gewohnt"),
    ("know", "that", "weiß weißt weiß wissen wusste wusstest wussten gewusst"),
    ("remember", "prep", "erinnere erinnerst erinnert erinnern erinnerte erinnertest erinnerten erinnert"),
    ("dream", "prep", "träume träumst träumt träumen träumte träumtest träumten geträumt"),
    ("get up", "none", "stehe stehst steht stehen stand standest standen aufgestanden"),
]


@pytest.mark.parametrize(("determiner", "adjective", "noun", "plural", "expected"), DECLENSIONS)
def test_declension(determiner, adjective, noun, plural, expected):
    node = NounPhrase(NOUNS[noun], determiner, plural, (ADJECTIVES[adjective],))
    got = [" ".join(word for word, _ in nominal(node, case).german) for case in range(4)]
    assert got == expected.split(" | ")


@pytest.mark.parametrize(("lemma", "frame", "expected"), CONJUGATIONS)
def test_conjugation(lemma, frame, expected):
    verb = next(verb for verb in VERBS if verb.lemma == lemma and frame in [own.name for own in verb.frames])
    present, past = verb.german_present, verb.german_past
    assert [*present[:4], past[0], past[1], past[3], verb.german_participle] == expected.split()
    assert present[4] == present[3]
    assert (past[2], past[4]) == (past[0], past[3])


def test_perfect_with_sein():
    moving = {verb.lemma for verb in VERBS if verb.auxiliary == "sein"}
    assert moving == {
        *("follow", "get up", "arrive", "run away", "fall asleep", "go", "run", "jump", "drive"),
        *("come", "stay"),
    }


def test_genders_have_their_articles():
    assert DEFINITE[0] == ("der", "die", "das", "die")
    genders = {noun.german[0][0]: DEFINITE[0][noun.gender] for noun in NOUNS.values()}
    assert genders["Mädchen"] == "das"
    assert genders["Schlossmauer"] == "die"
    assert genders["Apfelkuchen"] == "der"


@pytest.mark.parametrize(
    ("word", "expected"),
    [("dog", "dogs"), ("box", "boxes"), ("church", "churches"), ("city", "cities"), ("boy", "boys"), ("go", "goes")],
)
def test_english_s(word, expected):
    assert with_s(word) == expected


@pytest.mark.parametrize(
    ("word", "expected"), [("call", "called"), ("love", "loved"), ("cry", "cried"), ("play", "played")]
)
def test_english_ed(word, expected):
    assert with_ed(word) == expected


def test_indefinite_article():
    words = ("dog", "apple", "old", "umbrella", "house")
    assert [indefinite_article(word) for word in words] == ["a", "an", "an", "an", "a"]


def test_no_english_word_leaves_tense_or_number_open():
    same = {verb.base for verb in VERBS if verb.past in (verb.base, verb.third)}
    assert same == {"read"}
    # So it is never in the simple past: only with something that tells, as in "was read" or "has read".
    pasts = {"las", "last", "lasst", "lasen", "lasest"}
    assert not any(pasts & set(example.target) for example in generate(30_000))
    for noun in NOUNS.values():
        assert noun.plural != noun.singular, noun.lemma


def test_adjective_and_noun_have_one_translation():
    for words in (NOUNS, ADJECTIVES):
        assert len(words) == len(set(words))
    german = [noun.german[0][0] for noun in NOUNS.values()]
    assert len(german) == len(set(german))
