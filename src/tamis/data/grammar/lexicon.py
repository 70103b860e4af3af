"""The words: what each is in both languages, how it inflects, and what it goes with.

A line of NOUNS is English and its plural where irregular | article, singular, genitive unless feminine, plural ("-" for
none) | kinds.  A line of VERBS is English, past and participle where irregular, a particle that may follow the object
("+up") or not ("=for") | German with its separable prefix ("an+rufen"), the forms of du and er where their vowel
changes, past and participle where irregular, "ist" where the perfect takes sein | frames with the kinds of their
objects | kinds of subjects.
"""

from __future__ import annotations

NOUNS = """
man men | der Mann Mannes Männer | person
woman women | die Frau Frauen | person
child children | das Kind Kindes Kinder | person
boy | der Junge Jungen Jungen | person
girl | das Mädchen Mädchens Mädchen | person
teacher | der Lehrer Lehrers Lehrer | person
student | der Student Studenten Studenten | person
neighbour | der Nachbar Nachbarn Nachbarn | person
friend | der Freund Freundes Freunde | person
brother | der Bruder Bruders Brüder | person
sister | die Schwester Schwestern | person
mother | die Mutter Mütter | person
king | der König Königs Könige | person
queen | die Königin Königinnen | person
dog | der Hund Hundes Hunde | animal
cat | die Katze Katzen | animal
horse | das Pferd Pferdes Pferde | animal
bird | der Vogel Vogels Vögel | animal
mouse mice | die Maus Mäuse | animal
bear | der Bär Bären Bären | animal
book | das Buch Buches Bücher | thing text
newspaper | die Zeitung Zeitungen | thing reading
key | der Schlüssel Schlüssels Schlüssel | thing
letter | der Brief Briefes Briefe | thing text
ring | der Ring Ringes Ringe | thing
picture | das Bild Bildes Bilder | thing
bag | die Tasche Taschen | thing
hat | der Hut Hutes Hüte | thing clothing
coat | der Mantel Mantels Mäntel | thing clothing
cup | die Tasse Tassen | thing
glass | das Glas Glases Gläser | thing
lamp | die Lampe Lampen | thing
clock | die Uhr Uhren | thing
chair | der Stuhl Stuhls Stühle | thing surface
car | das Auto Autos Autos | vehicle
bus | der Bus Busses Busse | vehicle
ship | das Schiff Schiffes Schiffe | vehicle
house | das Haus Hauses Häuser | place building
garden | der Garten Gartens Gärten | place
city | die Stadt Städte | place
school | die Schule Schulen | place building
kitchen | die Küche Küchen | place
forest | der Wald Waldes Wälder | place
church | die Kirche Kirchen | place building
room | das Zimmer Zimmers Zimmer | place
castle | das Schloss Schlosses Schlösser | place building
table | der Tisch Tisches Tische | furniture surface
bench | die Bank Bänke | furniture surface
bridge | die Brücke Brücken | landmark surface
roof | das Dach Daches Dächer | landmark surface
door | die Tür Türen | opening
window | das Fenster Fensters Fenster | opening
tree | der Baum Baumes Bäume | landmark
wall | die Mauer Mauern | landmark
apple | der Apfel Apfels Äpfel | food
cake | der Kuchen Kuchens Kuchen | food
bread | das Brot Brotes - | food
cheese | der Käse Käses - | food
water | das Wasser Wassers - | drink
wine | der Wein Weines - | drink
milk | die Milch - | drink
tea | der Tee Tees - | drink
"""

# Head: its modifiers, each in English and as German joins it.
COMPOUNDS = """
door | house Haus, kitchen Küchen, garden Garten, school Schul, church Kirchen, castle Schloss
window | house Haus, kitchen Küchen, school Schul, church Kirchen, castle Schloss
wall | house Haus, garden Garten, school Schul, church Kirchen, castle Schloss
roof | house Haus, school Schul, church Kirchen, castle Schloss
clock | kitchen Küchen, school Schul, church Kirchen, castle Schloss
bench | kitchen Küchen, garden Garten, school Schul, church Kirchen
lamp | kitchen Küchen, garden Garten, school Schul
key | house Haus, garden Garten, school Schul, church Kirchen, castle Schloss
chair | kitchen Küchen, garden Garten, school Schul
table | kitchen Küchen, garden Garten
tree | apple Apfel, cherry Kirsch, plum Pflaumen
cake | apple Apfel, cherry Kirsch, plum Pflaumen
cup | tea Tee, milk Milch
glass | wine Wein, water Wasser, milk Milch, tea Tee
coat | winter Winter, summer Sommer
hat | winter Winter, summer Sommer
bag | school Schul
"""

VERBS = """
see saw seen | sehen siehst sieht sah gesehen | acc person animal thing vehicle place landmark | person animal
hear heard heard | hören | acc person animal vehicle; that | person animal
find found found | finden fand gefunden | acc person animal thing vehicle | person animal
look =for | suchen | acc person animal thing vehicle | person animal
love | lieben | acc person animal place food drink | person
know knew known | kennen kannte gekannt | acc person animal place | person
forget forgot forgotten | vergessen vergisst vergisst vergaß vergessen | acc person thing; to | person
like | mögen mochte gemocht | acc person animal place food drink | person
need | brauchen | acc person animal thing vehicle food drink furniture | person
read read read | lesen liest liest las gelesen | acc text reading; place | person
write wrote written | schreiben schrieb geschrieben | acc text | person
carry | tragen trägst trägt trug getragen | acc animal thing food drink furniture | person
lose lost lost | verlieren verlor verloren | acc thing | person
clean | putzen | acc vehicle building furniture opening | person
draw drew drawn | zeichnen | acc person animal thing place landmark | person
buy bought bought | kaufen | acc animal thing vehicle food drink furniture | person
sell sold sold | verkaufen | acc animal thing vehicle food furniture | person
take took taken | nehmen nimmst nimmt nahm genommen | acc thing food drink | person
open | öffnen | acc opening | person
close | schließen schloss geschlossen | acc opening | person
wash | waschen wäschst wäscht wusch gewaschen | acc animal vehicle thing | person
eat ate eaten | essen isst isst aß gegessen | acc food | person animal
drink drank drunk | trinken trank getrunken | acc drink | person animal
visit | besuchen | acc person place | person
meet met met | treffen triffst trifft traf getroffen | acc person | person
build built built | bauen | acc building vehicle furniture landmark | person
feed fed fed | füttern | acc animal | person
help | helfen hilfst hilft half geholfen | dat person animal | person animal
thank | danken | dat person | person
follow | folgen ist | dat person animal vehicle | person animal
answer | antworten | dat person | person
listen =to | zu+hören | dat person animal | person
give gave given | geben gibst gibt gab gegeben | give thing food drink animal | person
show showed shown | zeigen | give thing place vehicle animal | person
send sent sent | schicken | give thing food | person
bring brought brought | bringen brachte gebracht | give thing food drink animal | person
call | an+rufen rief gerufen | acc person | person
invite | ein+laden lädst lädt lud geladen | acc person | person
pick +up | ab+holen | acc person thing | person
bring brought brought +along | mit+bringen brachte gebracht | acc thing food drink | person
look =at | an+schauen | acc person animal thing vehicle place | person animal
throw threw thrown +away | weg+werfen wirfst wirft warf geworfen | acc thing food | person
get got got +up | auf+stehen stand ist gestanden | none | person animal
arrive | an+kommen kam ist gekommen | place | person vehicle
run ran run +away | weg+laufen läufst läuft lief ist gelaufen | none | person animal
fall fell fallen +asleep | ein+schlafen schläfst schläft schlief ist geschlafen | place | person animal
sleep slept slept | schlafen schläfst schläft schlief geschlafen | place | person animal
sing sang sung | singen sang gesungen | place | person animal
dance | tanzen | place | person animal
play | spielen | place | person animal
cook | kochen | place | person
laugh | lachen | place; prep about über acc person animal | person
work | arbeiten | place | person
live | wohnen | at | person
stand stood stood | stehen stand gestanden | at | person animal vehicle
stay | bleiben blieb ist geblieben | at | person animal
sit sat sat | sitzen saß gesessen | at | person animal
go went gone | gehen ging ist gegangen | move | person animal
run ran run | laufen läufst läuft lief ist gelaufen | move | person animal
jump | springen sprang ist gesprungen | move | person animal
drive drove driven | fahren fährst fährt fuhr ist gefahren | move | person vehicle
come came come | kommen kam ist gekommen | move | person animal vehicle
wait | warten | place; prep for auf acc person animal vehicle | person animal
think thought thought | denken dachte gedacht | prep of an acc person animal place | person
dream | träumen | prep of von dat person animal place vehicle | person
speak spoke spoken | sprechen sprichst spricht sprach gesprochen | place; prep with mit dat person animal | person
look =forward | sich freuen | prep to auf acc food drink person | person
remember | sich erinnern | prep - an acc person animal place thing | person
hurry | sich beeilen | none | person
say said said | sagen | that | person
believe | glauben | that; dat person | person
know knew known | wissen wusste gewusst | that; ask | person
hope | hoffen | that; to | person
ask | fragen | ask | person
try | versuchen | to | person
rain | regnen | weather | -
begin began begun | an+fangen fängst fängt fing gefangen | to | person
"""

# English, comparative where irregular or long | German, comparative where irregular | kinds of nouns.
ADJECTIVES = """
old | alt älter | person animal thing vehicle place landmark building furniture opening
young | jung jünger | person animal
small | klein | person animal thing vehicle place landmark furniture opening food
big bigger | groß größer | person animal thing vehicle place landmark furniture opening food
new | neu | thing vehicle building furniture opening
beautiful - | schön | person animal thing vehicle place landmark
good better | gut besser | person food drink thing
red redder | rot röter | thing vehicle opening furniture
blue bluer | blau | thing vehicle opening furniture
green greener | grün | thing vehicle opening place
dark | dunkel dunkler | place landmark opening
expensive - | teuer teurer | thing vehicle food drink furniture
cold | kalt kälter | drink food place
warm | warm wärmer | drink food clothing
fresh | frisch | food drink
tired - | müde müder | person animal
happy happier | glücklich | person
poor | arm ärmer | person
strong | stark stärker | person animal drink
clever | klug klüger | person animal
"""

NAMES = ("Anna", "Paul", "Maria", "Peter")

# Words that share a number are linked | when: with any tense, or only with some.
TIMES = """
today:1 | heute:1 | present past perfect future
now:1 | jetzt:1 | present perfect
yesterday:1 | gestern:1 | past
tomorrow:1 | morgen:1 | future
in:1 the:1 morning:2 | am:1 Morgen:2 | present past future
in:1 the:1 evening:2 | am:1 Abend:2 | present past future
on:1 Monday:2 | am:1 Montag:2 | present past future
on:1 Sunday:2 | am:1 Sonntag:2 | present past future
every:1 day:2 | jeden:1 Tag:2 | present past
"""
FREQUENCIES = """
often:1 | oft:1
always:1 | immer:1
never:1 | nie:1
"""
MANNERS = """
quickly:1 | schnell:1
slowly:1 | langsam:1
quietly:1 | leise:1
alone:1 | allein:1
"""
