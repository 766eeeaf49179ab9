"""The prompts that the target answers for its drafter: subjects times requests, written for specnb (Apache-2.0)."""

from __future__ import annotations

import random

_THINGS = """\
the moon; volcanoes; bicycles; honey bees; bread; the Roman Empire; electric cars; photosynthesis; coffee; chess;
glaciers; the human heart; libraries; earthquakes; whales; the printing press; rice; satellites; antibiotics; jazz;
deserts; the stock market; steam engines; vaccines; owls; pottery; the Silk Road; rainbows; smartphones; cheese;
marathon running; black holes; tea; bridges; dinosaurs; the Olympic Games; cotton; sleep; wind turbines; maps;
elephants; glass; the Great Wall; swimming; clouds; tomatoes; the French Revolution; batteries; penguins; origami;
inflation; the immune system; trains; salt; coral reefs; photography; potatoes; the Vikings; magnets; yoga; tides;
chocolate; democracy; robots; butterflies; soap; lighthouses; the water cycle; guitars; spices; submarines; the
nervous system; paper; wolves; solar panels; opera; olive oil; comets; the Renaissance; insurance; mushrooms;
helicopters; gravity; tennis; the Amazon rainforest; clocks; camels; wool; thunderstorms; computer viruses; ballet;
apples; the periodic table; castles; vitamins; rockets; sharks; recycling; poetry; the Industrial Revolution;
telescopes; rivers; gold; football; ants; the brain; airports; hot springs; ice cream; the Sahara; fermentation;
canals; mirrors; kites; the internet; horses; plastics; sourdough; the ozone layer; theatre; bamboo; sailing;
encryption; fireflies; the Middle Ages; dolphins; concrete; gardening; the speed of light; beekeeping; pianos; DNA;
wetlands; taxes; pencils; the Arctic; fireworks; cats; supply and demand; windmills; pasta; muscles; ghosts in
folklore; archaeology; search engines; cycling to work; the violin; public transport; sunflowers; meditation; tunnels;
the Aztecs; radio; wolves in fairy tales; breakfast; caves; machine learning; orchids; the alphabet; tigers; hydrogen;
skiing; markets; lightning; honey"""
_PEOPLE = """\
a shy baker; an old fisherman; a young astronaut; a retired teacher; a clumsy wizard; a curious robot; a travelling
musician; a lonely lighthouse keeper; a brave mouse; a stubborn mechanic; a blind painter; a lost tourist; twin
sisters; a night watchman; a gardener who talks to plants; a postman on a small island; a detective who hates
mysteries; a dragon who is afraid of fire; a librarian; a shepherd; a young doctor; an inventor; a bus driver; a chess
champion; a boy and his dog; a cook at sea; a queen in hiding; a clockmaker; a street photographer; a scientist in
Antarctica; a retired spy; a beekeeper; a girl who collects sounds; a tailor; a glass blower; a pilot; an
archaeologist; a ferryman; a puppet maker; a cat in a bookshop"""
_PLACES = """\
in a village by the sea; on a train in the snow; in a city that never sleeps; in the desert; on a small island; at the
edge of a forest; in an old theatre; on the moon; in a mountain hut; in a flooded town; at a market; in a library at
night; on a ship; in a greenhouse; in a deserted station; during a storm; in the year 2150; in the Middle Ages"""
_TASKS = """\
learn a new language; save money every month; cook rice; plan a birthday party; write a good letter of application;
sleep better; grow tomatoes on a balcony; repair a flat bicycle tyre; prepare for an exam; start running; make new
friends in a new city; clean a kitchen; write a short story; give a speech without fear; pack for a week in the
mountains; choose a laptop; read more books; bake bread; organise a bookshelf; train a puppy; stop wasting food; build
a bird house; drink less coffee; take better photos; remember names; write thank-you notes; move house; learn to swim;
set up a home office; travel cheaply; mend a torn shirt; keep a diary; paint a room; teach a child to read; make a
weekly plan; learn the guitar; start a vegetable garden; care for a cactus; deal with a rude customer; ask for a
higher salary; back up a computer; choose a bicycle; prepare for a job interview; host a dinner for eight; learn touch
typing; eat more vegetables; plan a small wedding"""
_CODE = """\
reverses a string; counts the words in a text; finds the largest number in a list; checks whether a number is prime;
removes duplicates from a list; reads a CSV file and prints the first column; sorts a list of dictionaries by a key;
computes the factorial of a number; converts miles to kilometres; checks whether a word is a palindrome; merges two
sorted lists; counts the vowels in a string; returns the Fibonacci numbers up to n; flattens a nested list; finds the
most common word in a text; validates an e-mail address; computes the average of a list; rounds a price to two
decimals; finds all even numbers in a list; turns a list of pairs into a dictionary; measures how long a function
takes; splits a list into chunks; computes the greatest common divisor; prints a multiplication table; finds the
longest line of a file; converts a date to a weekday; capitalises each word; computes compound interest; draws a
triangle of stars; searches a sorted list by halving"""
_LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "SQL or Python", "Bash or Python")
_OPINIONS = """\
working from home; school uniforms; zoos; space travel; social media for children; homework; fast fashion; nuclear
power; self-driving cars; four-day weeks; online shopping; keeping pets in flats; tourism in small towns; electronic
books; exams; free public transport; eating meat; video games; living in a big city; learning Latin"""
_MAILS = """\
to a landlord about a broken heater; to a colleague who leaves the team; to a teacher to excuse a sick child; to a
hotel to ask for a late check-out; to a shop about a parcel that never came; to a friend you have not seen for years;
to the city about a dangerous crossing; to a customer whose order is late; to a neighbour about loud music; to a boss
to ask for a day off; to a club to become a member; to an author whose book you loved; to a team about a meeting that
moves to Thursday; to a dentist to change an appointment; to a bank about a lost card; to an airline about a cancelled
flight"""
_SENTENCES = """\
The meeting was moved to Friday because the manager was ill. | The old bridge was closed after engineers found cracks
in two of its pillars. | Our shop sells fresh fruit, vegetables and flowers from farms nearby. | She had read the
letter three times before she understood what it meant. | The new library opens on Monday and will lend tools as well
as books. | It rained for nine days, and on the tenth the river came into the street. | The experiment failed because
the samples were kept at the wrong temperature. | Children under six travel free if an adult is with them. | The
company will hire forty people and open a second office in the spring. | He sold his car, bought a bicycle and has
never been late since. | The museum shows two hundred paintings, most of them for the first time. | Most plants in the
garden survived the frost, but the lemon tree did not. | The team won the last game of the season and moves up to the
first league. | Please bring your own cup, since we no longer use paper ones. | The train to the coast leaves at seven
and arrives before noon."""
_EDITS = """\
Make this text more polite; Rewrite this in the past tense; Rewrite this for a child of six; Make this shorter; Turn
this into a headline and two sentences; Rewrite this as a question and an answer; Make this text more formal; Correct
and improve this text; Translate this into simple English; Turn this into a short dialogue; Continue this text; Write
a short poem from this; List the facts in this text"""
_SUMS = """\
A shirt costs {a} dollars and a hat costs {b} dollars. What do {c} shirts and two hats cost?; A train travels {a}
kilometres in {c} hours. How fast is it on average?; Anna has {a} apples and gives {c} to each of her {d} friends. How
many are left?; A box holds {d} rows of {c} eggs. How many eggs are in {b} boxes?; What is {a} percent of {b}00?; A
garden is {b} metres long and {c} metres wide. What is its area and its perimeter?; Tom is {a} years old and his
sister is {c} years younger. How old will she be in {d} years?; Share {b}0 sweets fairly among {c} children. How many
does each get, and how many are left?"""


def _list(text: str, separator: str = ";") -> list[str]:
    return [" ".join(one.split()) for one in text.split(separator)]


_REQUESTS = {
    "explain": (
        "Explain {thing} in simple words.",
        "What is interesting about {thing}?",
        "Tell me about {thing}.",
        "How would you explain {thing} to a ten-year-old?",
        "Why do {thing} matter?",
        "Give me a short introduction to {thing}.",
        "What are common misunderstandings about {thing}?",
        "Describe the history of {thing} in one paragraph.",
        "What should everybody know about {thing}?",
        "Write a short article about {thing}.",
    ),
    "list": (
        "List five facts about {thing}.",
        "Give me ten words that have to do with {thing}.",
        "Write three quiz questions about {thing} with answers.",
        "Name the advantages and disadvantages of {thing}.",
        "Make a table of contents for a book about {thing}.",
        "What are the three most important things to know about {thing}?",
    ),
    "compare": (
        "Compare {thing} and {other}.",
        "What do {thing} and {other} have in common?",
        "Which is more important, {thing} or {other}, and why?",
    ),
    "story": (
        "Write a short story about {person} {place}.",
        "Tell me a story that begins with {person} {place}.",
        "Write the first page of a novel about {person}.",
        "Write a bedtime story about {person} and {thing}.",
        "Describe a day in the life of {person}.",
        "Write a dialogue between {person} and {someone}.",
        "Invent a legend about {thing}.",
    ),
    "poem": ("Write a poem about {thing}.", "Write a haiku about {thing}.", "Write a song about {person} {place}."),
    "how to": (
        "How can I {task}?",
        "Give me step-by-step instructions: how to {task}.",
        "I want to {task}. What should I watch out for?",
        "What do people do wrong when they {task}?",
        "Write a checklist for someone who wants to {task}.",
        "Give me three tips to {task}.",
    ),
    "code": (
        "Write a {language} function that {code}.",
        "Write a {language} function that {code}, and explain it.",
        "Show me a {language} program that {code}, with an example.",
        "How would you write code in {language} that {code}?",
    ),
    "opinion": (
        "What speaks for and against {opinion}?",
        "Write a short speech in favour of {opinion}.",
        "Write a letter to a newspaper against {opinion}.",
        "How will {opinion} look in twenty years?",
    ),
    "mail": ("Write an e-mail {mail}.", "Write a short and friendly message {mail}.", "Write a formal letter {mail}."),
    "edit": ("{edit}: {text}", "{edit}:\n\n{text} {more}", '{edit}.\n"{text}"'),
    "sum": ("{sum}", "{sum} Show your steps."),
    "chat": (
        "Hi! What do you know about {thing}?",
        "I am bored. Tell me something about {thing}.",
        "My friend says that {thing} are overrated. What do you think?",
        "I have to give a talk about {thing} tomorrow. Help me.",
        "What would {person} say about {thing}?",
        "Can you recommend something for somebody who likes {thing}?",
    ),
}
"""The requests by kind; kinds are drawn with equal probability, except those of `_SHARE`."""
_SHARE = {"explain": 4, "story": 3, "how to": 2, "chat": 2, "list": 2, "code": 2, "edit": 2}
HELD_OUT = (
    "Why is the sky blue?",
    "Write a short story about a key that opens every door.",
    "How do I make pancakes?",
    "What is the difference between weather and climate?",
    "Give me advice for my first day at a new job.",
    "Write a Python function that checks whether two words are anagrams.",
    "Explain how a refrigerator works.",
    "Who was Marie Curie?",
    "Write an invitation to a garden party.",
    "What happens when we dream?",
    "Describe a sunset over a harbour.",
    "How does a bill become a law?",
    "Suggest names for a small bookshop.",
    "Tell me a joke about computers and explain it.",
    "What should I cook with carrots, eggs and cheese?",
    "Summarise the plot of Romeo and Juliet.",
    "How can a small town attract young families?",
    "Write a product description for a wooden toy ship.",
    "What is a good way to learn the names of the stars?",
    "Explain the rules of badminton.",
    "Write a diary entry of a sailor who sees land after forty days.",
    "What are the symptoms of a cold, and when should I see a doctor?",
    "Plan a weekend in Lisbon.",
    "Write a JavaScript function that shuffles an array.",
    "How do noise-cancelling headphones work?",
    "Give three reasons to learn a musical instrument.",
    "Write a conversation between the sun and the wind.",
    "What is compound interest?",
    "Explain what an operating system does.",
    "How do birds find their way when they migrate?",
    "Write a thank-you note to a nurse.",
    "What makes a good leader?",
    "Describe how paper money is made.",
    "Write a fable about patience.",
    "A farmer has 17 sheep and buys 25 more. He sells 9. How many are left? Explain.",
    "What can I do against mould in the bathroom?",
    "Write a short biography of an invented composer.",
    "How is chocolate different from cocoa powder?",
    "What are black and white photographs good for?",
    "List things to do on a rainy afternoon with children.",
)
"""Forty prompts that no training prompt is made from, to measure with."""


def prompts(count: int, seed: int = 0) -> list[str]:
    """Different prompts in a random order.

    Args:
        count: how many.
        seed: the same seed gives the same prompts; a longer list starts with the shorter one.
    """
    draw = random.Random(seed)
    kinds = [kind for kind in _REQUESTS for _ in range(_SHARE.get(kind, 1))]
    things, people, sentences = _list(_THINGS), _list(_PEOPLE), _list(_SENTENCES, "|")
    found: dict[str, None] = {}
    while len(found) < count:
        numbers = {name: draw.randint(2, 9) for name in "cd"} | {name: draw.randint(11, 60) for name in "ab"}
        parts = {
            "thing": draw.choice(things),
            "other": draw.choice(things),
            "person": draw.choice(people),
            "someone": draw.choice(people),
            "place": draw.choice(_list(_PLACES)),
            "task": draw.choice(_list(_TASKS)),
            "language": draw.choice(_LANGUAGES),
            "code": draw.choice(_list(_CODE)),
            "opinion": draw.choice(_list(_OPINIONS)),
            "mail": draw.choice(_list(_MAILS)),
            "edit": draw.choice(_list(_EDITS)),
            "text": draw.choice(sentences),
            "more": draw.choice(sentences),
            "sum": draw.choice(_list(_SUMS)).format(**numbers),
        }
        found[draw.choice(_REQUESTS[draw.choice(kinds)]).format(**parts)] = None
    return list(found)
