"""Sentences and their links, written out by hand and compared with what the trees give."""

import pytest

from tamis.data.grammar.sentences import realise
from tamis.data.grammar.syntax import (
    Both,
    Clause,
    Content,
    Coordination,
    Name,
    NounPhrase,
    Place,
    Pronoun,
    Quality,
    Question,
    Relative,
    RelativePronoun,
    Statement,
    Subordination,
)
from tamis.data.grammar.words import ADJECTIVES, FREQUENCIES, MANNERS, NOUNS, TIMES, VERBS


def np(noun, determiner="the", *adjectives, plural=False, **more):
    return NounPhrase(NOUNS[noun], determiner, plural, tuple(ADJECTIVES[name] for name in adjectives), **more)


def clause(subject, lemma, object=None, *, frame=None, **more):
    verb, own = next(
        (verb, own) for verb in VERBS for own in verb.frames if verb.lemma == lemma and frame in (None, own.name)
    )
    return Clause(subject, verb, own, object, **more)


def adverb(english):
    return next(item for item in TIMES + FREQUENCIES + MANNERS if " ".join(word for word, _ in item.english) == english)


def in_the(noun, preposition="in", **more):
    return Place(preposition, np(noun), **more)


def is_(subject, adjective, than=None, **more):
    return Clause(subject, quality=Quality(ADJECTIVES[adjective], than), **more)


def that(noun, plural=False):
    return RelativePronoun(NOUNS[noun], plural)


ME, YOU, HE, SHE, WE, THEY, IT, WHO, WHAT = (
    Pronoun(word) for word in ("I", "you", "he", "she", "we", "they", "it", "who", "what")
)
MAN, WOMAN, DOG, CAT, BOOK = np("man"), np("woman"), np("dog"), np("cat"), np("book")

STATEMENTS = [
    (clause(MAN, "call", WOMAN), "The man calls the woman.", "Der Mann ruft die Frau an."),
    (clause(HE, "pick up", SHE), "He picks her up.", "Er holt sie ab."),
    (
        clause(THEY, "pick up", np("letter", "a", "old")),
        "They pick up an old letter.",
        "Sie holen einen alten Brief ab.",
    ),
    (clause(MAN, "call", WOMAN, tense="perfect"), "The man has called the woman.", "Der Mann hat die Frau angerufen."),
    (clause(ME, "get up", tense="perfect"), "I have got up.", "Ich bin aufgestanden."),
    (clause(YOU, "see", CAT, tense="past"), "You saw the cat.", "Du sahst die Katze."),
    (clause(YOU, "see", CAT, tense="past", negated=True), "You did not see the cat.", "Du sahst die Katze nicht."),
    (clause(MAN, "see", np("dog", "a"), negated=True), "The man does not see a dog.", "Der Mann sieht keinen Hund."),
    (
        clause(WE, "drink", np("water", "", "cold"), negated=True),
        "We do not drink cold water.",
        "Wir trinken kein kaltes Wasser.",
    ),
    (clause(THEY, "buy", np("apple", "", "red", plural=True)), "They buy red apples.", "Sie kaufen rote Äpfel."),
    (clause(SHE, "help", np("child", plural=True)), "She helps the children.", "Sie hilft den Kindern."),
    (clause(SHE, "help", np("boy", "a"), negated=True), "She does not help a boy.", "Sie hilft keinem Jungen."),
    (
        clause(MAN, "listen to", WE, opening=adverb("today")),
        "Today the man listens to us.",
        "Heute hört der Mann uns zu.",
    ),
    (
        clause(MAN, "give", BOOK, recipient=WOMAN),
        "The man gives the woman the book.",
        "Der Mann gibt der Frau das Buch.",
    ),
    (
        clause(MAN, "give", BOOK, recipient=WOMAN, recipient_last=True),
        "The man gives the book to the woman.",
        "Der Mann gibt der Frau das Buch.",
    ),
    (
        clause(ME, "show", BOOK, recipient=HE, time=adverb("today")),
        "I show him the book today.",
        "Ich zeige ihm heute das Buch.",
    ),
    (
        clause(MAN, "see", DOG, opening=adverb("in the morning")),
        "In the morning the man sees the dog.",
        "Am Morgen sieht der Mann den Hund.",
    ),
    (
        clause(MAN, "see", DOG, modal="can", negated=True),
        "The man cannot see the dog.",
        "Der Mann kann den Hund nicht sehen.",
    ),
    (clause(HE, "invite", ME, modal="want"), "He wants to invite me.", "Er will mich einladen."),
    (
        clause(HE, "invite", ME, modal="want", tense="past", negated=True),
        "He did not want to invite me.",
        "Er wollte mich nicht einladen.",
    ),
    (clause(WE, "work", modal="must", tense="past"), "We had to work.", "Wir mussten arbeiten."),
    (clause(YOU, "sleep", modal="should"), "You should sleep.", "Du solltest schlafen."),
    (
        clause(CAT, "sleep", tense="future", place=in_the("garden")),
        "The cat will sleep in the garden.",
        "Die Katze wird im Garten schlafen.",
    ),
    (clause(CAT, "run", place=in_the("house", "into")), "The cat runs into the house.", "Die Katze läuft ins Haus."),
    (
        clause(CAT, "run", place=in_the("tree", "behind", towards=True)),
        "The cat runs behind the tree.",
        "Die Katze läuft hinter den Baum.",
    ),
    (
        clause(CAT, "sit", place=in_the("tree", "behind")),
        "The cat sits behind the tree.",
        "Die Katze sitzt hinter dem Baum.",
    ),
    (
        clause(CAT, "sit", place=in_the("house", "in front of")),
        "The cat sits in front of the house.",
        "Die Katze sitzt vor dem Haus.",
    ),
    (clause(ME, "go", place=in_the("school", "to")), "I go to the school.", "Ich gehe zur Schule."),
    (
        clause(ME, "go", place=in_the("castle", "to"), manner=adverb("slowly"), tense="past"),
        "I went slowly to the castle.",
        "Ich ging langsam zum Schloss.",
    ),
    (
        clause(ME, "wait", np("bus"), frame="prep", place=in_the("city")),
        "I wait for the bus in the city.",
        "Ich warte in der Stadt auf den Bus.",
    ),
    (clause(MAN, "dream", np("house")), "The man dreams of the house.", "Der Mann träumt vom Haus."),
    (clause(MAN, "remember", WOMAN), "The man remembers the woman.", "Der Mann erinnert sich an die Frau."),
    (clause(ME, "hurry", tense="perfect"), "I have hurried.", "Ich habe mich beeilt."),
    (clause(WE, "look forward", np("cake")), "We look forward to the cake.", "Wir freuen uns auf den Kuchen."),
    (clause(SHE, "sing", frequency=adverb("often")), "She often sings.", "Sie singt oft."),
    (
        clause(MAN, "open", np("kitchen window")),
        "The man opens the kitchen window.",
        "Der Mann öffnet das Küchenfenster.",
    ),
    (clause(DOG, "see", MAN, passive=True), "The dog is seen by the man.", "Der Hund wird vom Mann gesehen."),
    (
        clause(np("letter", plural=True), "throw away", passive=True, tense="past"),
        "The letters were thrown away.",
        "Die Briefe wurden weggeworfen.",
    ),
    (is_(ME, "tired", negated=True), "I am not tired.", "Ich bin nicht müde."),
    (is_(DOG, "old", CAT, tense="past"), "The dog was older than the cat.", "Der Hund war älter als die Katze."),
    (
        is_(np("car", "this"), "expensive", np("bus")),
        "This car is more expensive than the bus.",
        "Dieses Auto ist teurer als der Bus.",
    ),
    (clause(np("dog", possessor=MAN, before=True), "sleep"), "The man's dog sleeps.", "Der Hund des Mannes schläft."),
    (
        clause(MAN, "see", np("dog", "the", "old", possessor=np("student"))),
        "The man sees the old dog of the student.",
        "Der Mann sieht den alten Hund des Studenten.",
    ),
    (
        clause(MAN, "help", np("dog", "the", "old", possessor=Name("Anna"), before=True)),
        "The man helps Anna's old dog.",
        "Der Mann hilft Annas altem Hund.",
    ),
    (
        clause(Both(MAN, Name("Maria")), "speak", DOG, frame="prep"),
        "The man and Maria speak with the dog.",
        "Der Mann und Maria sprechen mit dem Hund.",
    ),
    (
        clause(HE, "say", content=Content("that", clause(SHE, "call", ME, tense="perfect"))),
        "He says that she has called me.",
        "Er sagt, dass sie mich angerufen hat.",
    ),
    (
        clause(HE, "ask", content=Content("why", clause(SHE, "arrive", negated=True))),
        "He asks why she does not arrive.",
        "Er fragt, warum sie nicht ankommt.",
    ),
    (
        clause(HE, "try", content=Content("to", clause(HE, "call", ME)), tense="past"),
        "He tried to call me.",
        "Er versuchte, mich anzurufen.",
    ),
    (
        clause(ME, "begin", content=Content("to", clause(ME, "wash", DOG))),
        "I begin to wash the dog.",
        "Ich fange an, den Hund zu waschen.",
    ),
    (
        clause(np("man", relative=Relative(clause(that("man"), "sleep"))), "see", CAT),
        "The man who sleeps sees the cat.",
        "Der Mann, der schläft, sieht die Katze.",
    ),
    (
        clause(ME, "see", np("man", relative=Relative(clause(SHE, "help", that("man")), "object"))),
        "I see the man whom she helps.",
        "Ich sehe den Mann, dem sie hilft.",
    ),
    (
        clause(ME, "see", np("bus", relative=Relative(clause(SHE, "wait", that("bus"), frame="prep"), "object"))),
        "I see the bus for which she waits.",
        "Ich sehe den Bus, auf den sie wartet.",
    ),
    (
        clause(ME, "know", np("woman", relative=Relative(clause(np("dog", "whose (her)"), "sing")))),
        "I know the woman whose dog sings.",
        "Ich kenne die Frau, deren Hund singt.",
    ),
]

OTHERS = [
    (Question(clause(DOG, "see", CAT)), "Does the dog see the cat?", "Sieht der Hund die Katze?"),
    (Question(clause(YOU, "call", HE, tense="past")), "Did you call him?", "Riefst du ihn an?"),
    (Question(is_(YOU, "happy")), "Are you happy?", "Bist du glücklich?"),
    (Question(clause(WHO, "see", DOG), gap="subject"), "Who sees the dog?", "Wer sieht den Hund?"),
    (Question(clause(DOG, "see", WHO), gap="object"), "Whom does the dog see?", "Wen sieht der Hund?"),
    (Question(clause(DOG, "help", WHO), gap="object"), "Whom does the dog help?", "Wem hilft der Hund?"),
    (
        Question(clause(MAN, "speak", WHO, frame="prep"), gap="object"),
        "With whom does the man speak?",
        "Mit wem spricht der Mann?",
    ),
    (
        Question(clause(MAN, "bring along", WHAT, tense="perfect"), gap="object"),
        "What has the man brought along?",
        "Was hat der Mann mitgebracht?",
    ),
    (
        Question(clause(MAN, "see", np("dog", "which")), gap="object"),
        "Which dog does the man see?",
        "Welchen Hund sieht der Mann?",
    ),
    (
        Question(clause(np("dog", "how many", plural=True), "sleep"), gap="subject"),
        "How many dogs sleep?",
        "Wie viele Hunde schlafen?",
    ),
    (
        Question(clause(MAN, "give", BOOK, recipient=WHO), gap="recipient"),
        "To whom does the man give the book?",
        "Wem gibt der Mann das Buch?",
    ),
    (Question(clause(THEY, "live"), "where"), "Where do they live?", "Wo wohnen sie?"),
    (Question(clause(THEY, "go"), "where to"), "Where do they go?", "Wohin gehen sie?"),
    (Question(clause(THEY, "laugh", tense="past"), "why"), "Why did they laugh?", "Warum lachten sie?"),
    (
        Question(clause(HE, "sleep", modal="can", negated=True), "why"),
        "Why can he not sleep?",
        "Warum kann er nicht schlafen?",
    ),
    (
        Subordination(clause(ME, "sleep"), "because", clause(IT, "rain")),
        "I sleep because it rains.",
        "Ich schlafe, weil es regnet.",
    ),
    (
        Subordination(clause(ME, "sleep"), "if", clause(SHE, "fall asleep"), True),
        "If she falls asleep, I sleep.",
        "Wenn sie einschläft, schlafe ich.",
    ),
    (
        Subordination(clause(MAN, "get up", tense="past"), "when", clause(DOG, "laugh", tense="past"), True),
        "When the dog laughed, the man got up.",
        "Als der Hund lachte, stand der Mann auf.",
    ),
    (
        Coordination(clause(MAN, "sing"), "but", clause(WOMAN, "listen to", HE, negated=True)),
        "The man sings, but the woman does not listen to him.",
        "Der Mann singt, aber die Frau hört ihm nicht zu.",
    ),
]

LINKS = [
    # do-support has no counterpart; the separable verb is one verb
    (Question(clause(DOG, "call", CAT)), "the-der dog-Hund call-Ruft call-an the-die cat-Katze ?-?"),
    # "not" and "a" in one word
    (Statement(clause(ME, "see", np("dog", "a"), negated=True)), "I-Ich see-sehe not-keinen a-keinen dog-Hund .-."),
    (Statement(clause(ME, "sleep", place=in_the("garden"))), "I-Ich sleep-schlafe in-im the-im garden-Garten .-."),
    (
        Statement(clause(ME, "buy", np("kitchen lamp", "my"))),
        "I-Ich buy-kaufe my-meine kitchen-Küchenlampe lamp-Küchenlampe .-.",
    ),
    # The article of "der Hund" and the commas of German stand alone.
    (
        Statement(clause(np("dog", possessor=MAN, before=True), "sleep")),
        "The-des man's-Mannes dog-Hund sleeps-schläft .-.",
    ),
    (
        Statement(clause(np("dog", possessor=MAN), "sleep")),
        "The-Der dog-Hund of-des the-des man-Mannes sleeps-schläft .-.",
    ),
    (
        Statement(clause(HE, "try", content=Content("to", clause(HE, "pick up", ME)))),
        "He-Er tries-versucht to-abzuholen pick-abzuholen me-mich up-abzuholen .-.",
    ),
    (Statement(clause(HE, "remember", ME)), "He-Er remembers-erinnert remembers-sich remembers-an me-mich .-."),
    (Statement(clause(HE, "sleep", modal="can", negated=True)), "He-Er cannot-kann cannot-nicht sleep-schlafen .-."),
    (Statement(clause(HE, "sleep", modal="want")), "He-Er wants-will sleep-schlafen .-."),
    (
        Statement(clause(HE, "give", BOOK, recipient=WOMAN, recipient_last=True)),
        "He-Er gives-gibt the-das book-Buch to-der the-der woman-Frau .-.",
    ),
]


@pytest.mark.parametrize(("tree", "english", "german"), STATEMENTS, ids=[row[1] for row in STATEMENTS])
def test_statement(tree, english, german):
    example = realise(Statement(tree))
    assert (example.source_text, example.target_text) == (english, german)


@pytest.mark.parametrize(("tree", "english", "german"), OTHERS, ids=[row[1] for row in OTHERS])
def test_sentence(tree, english, german):
    example = realise(tree)
    assert (example.source_text, example.target_text) == (english, german)


@pytest.mark.parametrize(("tree", "expected"), LINKS, ids=[row[1] for row in LINKS])
def test_links(tree, expected):
    example = realise(tree)
    named = sorted(f"{example.source[source]}-{example.target[target]}" for source, target in example.links)
    assert named == sorted(expected.split())
