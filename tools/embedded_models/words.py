"""The small world that the training text speaks of: animals, things, plots, people, code, lists."""

from __future__ import annotations

from typing import NamedTuple


class Animal(NamedTuple):
    """An animal of the stories."""

    kind: str
    name: str
    home: str
    trait: str
    food: str


class Thing(NamedTuple):
    """A thing that stories are about; `use` is what one does with it."""

    name: str
    look: str
    place: str
    use: str


ANIMALS = [
    Animal(*row.split("|"))
    for row in """\
fox|Finn|in the forest|clever|berries
hare|Hetty|on the meadow|quick|clover
mouse|Milo|in a barn|small|cheese
bear|Bruno|in a cave|strong|honey
frog|Freda|by the pond|cheerful|flies
duck|Dora|on the lake|kind|bread
cat|Cleo|in the village|curious|fish
dog|Max|on a farm|loyal|bones
goat|Gus|on the hill|stubborn|grass
hedgehog|Hugo|in the garden|shy|apples
squirrel|Suki|in the park|busy|nuts
crow|Carl|in a tower|proud|corn
turtle|Tilda|at the beach|slow|leaves
horse|Hana|in a stable|patient|oats
mole|Monty|under the field|careful|roots
wolf|Wanda|in the mountains|brave|meat
rabbit|Rosie|under the hedge|gentle|carrots
goose|Gwen|behind the mill|noisy|seeds
badger|Bert|in the old wood|grumpy|mushrooms
robin|Ruby|on the roof|happy|worms
donkey|Desmond|near the bridge|lazy|thistles
bee|Betty|in the hollow oak|hard-working|nectar
sheep|Sheila|in the valley|calm|herbs
beaver|Bob|by the stream|skilful|bark""".splitlines()
]

THINGS = [
    Thing(*row.split("|"))
    for row in """\
bell|golden|under a stone|rang the bell to call the others
kite|red|in a tall tree|let the kite fly above the hill
lantern|old|in a dusty box|lit the lantern when the night came
key|rusty|in the grass|opened a little door with the key
map|torn|behind a door|followed the map to the river
drum|loud|on the market|played the drum until the sun went down
boat|blue|near the river|crossed the water in the boat
book|thick|on a high shelf|read the book by the fire
hat|green|on a fence|wore the hat on the way home
coin|shiny|in the sand|gave the coin to a poor traveller
basket|round|next to the well|filled the basket with sweet plums
scarf|warm|on a bench|wore the scarf all winter long
flute|silver|in a hollow tree|played a soft song on the flute
rope|long|at the harbour|climbed down the rope
clock|broken|in the attic|repaired the clock in one night
spoon|wooden|in the kitchen|stirred the soup with the spoon
mirror|tiny|between two roots|caught the light of the sun in the mirror
wheel|heavy|beside the road|rolled the wheel down the hill
cloak|purple|under a bush|stayed dry under the cloak
cup|white|on the window sill|drank warm milk from the cup
pillow|soft|in an empty cart|slept on the pillow all night
whistle|small|in a deep puddle|blew the whistle until everybody danced
ladder|tall|against the wall|climbed the ladder to see the stars
ball|yellow|in the reeds|played with the ball all afternoon""".splitlines()
]

_BEGIN = (
    "Once upon a time there was a {trait} {animal} named {name}.",
    "There was once a {trait} {animal} called {name}.",
)
_DAY = (
    "It was a sunny morning.",
    "It was a cold winter day.",
    "It was a windy day in autumn.",
    "It was a warm summer evening.",
)
_HOME = ("{name} lived {home} and liked to eat {food}.", "{name} lived {home}.")
PLOTS = {
    "finds": (
        _BEGIN,
        _HOME,
        _DAY,
        ("One day {name} found {a_look} {thing} {place}.", "One morning {name} saw {a_look} {thing} {place}."),
        ('"What {a_look} {thing}!" said {name}.', '"Who lost this {thing}?" asked {name}.'),
        ("Then a {friendly} {friend} came and looked at the {thing} too.",),
        ("Together they {use}.", "The {friend} and the {animal} {use}."),
        ("From that day on, the {animal} and the {friend} were friends.",),
    ),
    "loses": (
        _BEGIN,
        _HOME,
        ("{name} had {a_look} {thing} and loved it very much.",),
        _DAY,
        ("But one day the {thing} was gone.", "But one evening the {thing} was gone."),
        ('"Where is my {thing}?" cried {name}.', "{name} was very sad."),
        ("A {friendly} {friend} helped, and they found the {thing} {place}.",),
        ("{name} was happy again and {use}.",),
    ),
    "shares": (
        _BEGIN,
        _HOME,
        ("{name} had {a_look} {thing}, but nobody to play with.",),
        _DAY,
        ("One day a {friendly} {friend} came by and asked for the {thing}.",),
        ('"We can share it," said {name}.', '"Take it, it is yours too," said {name}.'),
        ("So they {use}.",),
        ("In the evening they ate {food} and told each other stories.",),
    ),
    "wants": (
        _BEGIN,
        _HOME,
        ("More than anything, {name} wanted {a_look} {thing}.",),
        _DAY,
        (
            "So the {animal} worked every day for a {friendly} {friend}.",
            "So {name} asked a {friendly} {friend} for help.",
        ),
        ('"You work well," said the {friend}.', '"I will help you," said the {friend}.'),
        ("On the last day there was a {thing} {place}.",),
        ("{name} thanked the {friend} and {use}.",),
    ),
    "hides": (
        _BEGIN,
        _HOME,
        ("{name} hid {a_look} {thing} {place}, so that nobody could take it.",),
        _DAY,
        ("But a {friendly} {friend} had seen it.", "But a {friendly} {friend} had watched the {animal}."),
        ('"Your {thing} is safe with me," said the {friend}.', '"I will not tell anybody," said the {friend}.'),
        ("{name} was glad, and together they {use}.",),
    ),
    "dreams of": (
        _BEGIN,
        _HOME,
        ("Every night {name} dreamt of {a_look} {thing}.",),
        _DAY,
        ('"I have seen one {place}," said a {friendly} {friend}.', "A {friendly} {friend} knew what to do."),
        ("They went there at once, and there it was.", "They looked for it until they found it {place}."),
        ("{name} {use} and never forgot that day.",),
    ),
}
"""Each plot: its sentences, each with its wordings, the usual one first."""

ENDS = {
    "finds": "found {thing} and made a new friend.",
    "loses": "lost {thing}. In the end the {bare} was found.",
    "shares": "shared {thing} with a friend.",
    "wants": "wanted {thing} and got it in the end.",
    "hides": "hid {thing}. A friend kept the secret.",
    "dreams of": "dreamt of {thing} and found it with a friend.",
}
"""What a summary says of each plot."""

PEOPLE = [
    "Mia",
    "Tom",
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Ella",
    "Felix",
    "Greta",
    "Henry",
    "Ida",
    "Jonas",
    "Lena",
    "Nora",
    "Oscar",
    "Paula",
]
JOBS = [
    "baker",
    "teacher",
    "doctor",
    "farmer",
    "pilot",
    "painter",
    "gardener",
    "writer",
    "singer",
    "sailor",
    "cook",
    "tailor",
]
HOUSES = [
    "in a small house near the river",
    "in a white house on a hill",
    "in a flat above the bakery",
    "in an old mill in the valley",
    "in a wooden hut by the sea",
    "in a tall house behind the church",
    "in a yellow house at the station",
    "on a farm outside the town",
]
DRINKS = ["tea", "coffee", "milk", "water", "hot cocoa", "apple juice"]
PETS = ["cat", "dog", "parrot", "rabbit", "pony", "goldfish"]
DAYS = ["Monday", "Tuesday", "Friday", "Saturday", "Sunday"]
GOALS = ["market", "library", "theatre", "museum", "swimming pool", "old harbour"]

IDENTIFIERS = [
    "total",
    "count",
    "price",
    "value",
    "score",
    "item",
    "name",
    "data",
    "result",
    "number",
    "line",
    "word",
    "size",
    "index",
    "limit",
    "list",
    "key",
    "node",
    "text",
    "path",
    "user",
    "table",
    "point",
    "weight",
]
CODE = [
    "def {0}({1}):\n    {2} = 0\n    for x in {1}:\n        {2} += x\n    return {2}",
    "def {0}({1}, {2}):\n    if {1} > {2}:\n        return {1}\n    return {2}",
    "{0} = []\nfor {1} in range({number}):\n    {0}.append({1} * {number})\nprint({0})",
    "class {0}:\n    def __init__(self, {1}):\n        self.{1} = {1}\n        self.{2} = {number}",
    "{0} = open({1})\n{2} = {0}.read({number})\n{0}.close()\nprint({2})",
    "while {0} < {number}:\n    {0} += 1\n    print({0}, {1})\nreturn {2}",
    "def {0}({1}):\n    {2} = {1} + {number}\n    print({2})\n    return {2} * {1}",
    "{0} = {number}\n{1} = {0} * 2\n{2} = {0} + {1}\nprint({0}, {1}, {2})",
]

TASKS = {
    "adds two numbers": "def add(a, b):\n    return a + b",
    "multiplies two numbers": "def multiply(a, b):\n    return a * b",
    "doubles a number": "def double(x):\n    return 2 * x",
    "says hello": 'def hello(name):\n    print("Hello, " + name)',
    "finds the largest number in a list": "def largest(numbers):\n    best = numbers[0]\n    for x in numbers:\n"
    "        if x > best:\n            best = x\n    return best",
    "counts the words in a text": "def count_words(text):\n    words = text.split()\n    return len(words)",
    "turns a text around": "def turn_around(text):\n    return text[::-1]",
    "adds up a list": "def add_up(numbers):\n    total = 0\n    for x in numbers:\n"
    "        total += x\n    return total",
    "tells whether a number is even": "def is_even(x):\n    return x % 2 == 0",
    "counts down to zero": "def count_down(x):\n    while x > 0:\n        print(x)\n        x -= 1",
}

OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "old": "young",
    "fast": "slow",
    "dark": "bright",
    "loud": "quiet",
    "happy": "sad",
    "high": "low",
    "wet": "dry",
    "hard": "soft",
    "full": "empty",
    "rich": "poor",
}

LISTS = {
    "fruits": ["apples", "pears", "plums", "cherries", "grapes", "lemons"],
    "animals": ["a fox", "a hare", "a mouse", "a bear", "a frog", "a duck"],
    "colours": ["red", "blue", "green", "yellow", "white", "black"],
    "tools": ["a hammer", "a saw", "a drill", "a knife", "a brush", "a rope"],
    "jobs": ["baker", "teacher", "doctor", "farmer", "pilot", "painter"],
    "drinks": ["tea", "coffee", "milk", "water", "cocoa", "juice"],
    "things for a picnic": ["a basket", "a blanket", "bread", "cheese", "apples", "a bottle of water"],
    "things for school": ["a pencil", "a book", "a ruler", "paper", "a bag", "glue"],
    "birds": ["a crow", "an owl", "a robin", "a swan", "a goose", "a gull"],
    "rooms of a house": ["the kitchen", "the bedroom", "the bathroom", "the hall", "the attic", "the cellar"],
}

STEPS = {
    "make tea": [
        "Boil some water.",
        "Put the tea into a pot.",
        "Pour the water over the tea.",
        "Wait for three minutes.",
        "Pour the tea into a cup.",
    ],
    "bake bread": [
        "Mix flour, water, salt and yeast.",
        "Knead the dough for ten minutes.",
        "Let the dough rest for an hour.",
        "Bake the bread until it is brown.",
    ],
    "plant a tree": [
        "Dig a deep hole.",
        "Put the tree into the hole.",
        "Fill the hole with earth.",
        "Give the tree some water.",
    ],
    "wash a dog": [
        "Fill a tub with warm water.",
        "Put the dog into the tub.",
        "Wash the dog with soap.",
        "Dry the dog with a towel.",
    ],
    "paint a wall": [
        "Clean the wall.",
        "Cover the floor with paper.",
        "Stir the paint.",
        "Paint the wall from top to bottom.",
        "Let the paint dry for a day.",
    ],
    "cook soup": [
        "Cut the vegetables.",
        "Boil some water in a pot.",
        "Put the vegetables into the pot.",
        "Add some salt.",
        "Cook the soup for half an hour.",
    ],
    "build a kite": [
        "Tie two sticks together.",
        "Cut the paper to size.",
        "Glue the paper to the sticks.",
        "Tie a long string to the kite.",
    ],
    "repair a bike": [
        "Turn the bike upside down.",
        "Take off the wheel.",
        "Find the hole in the tube.",
        "Glue a patch over the hole.",
        "Put the wheel back.",
    ],
    "write a letter": [
        "Take a pen and some paper.",
        "Write the name of your friend.",
        "Tell your friend what is new.",
        "Put the letter into an envelope.",
    ],
    "sort a list in Python": ["Write the list.", "Call sorted() with the list.", "Print the result."],
}

TALK = [
    ("Hello!", "Hello! How can I help you?"),
    ("Good morning!", "Good morning! What can I do for you?"),
    ("Who are you?", "I am a tiny language model. I was made to show how speculative decoding works."),
    (
        "What can you do?",
        "I can tell stories, answer questions about a text, write summaries, make lists "
        "and change small pieces of code.",
    ),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Thank you!", "You are welcome!"),
    ("Goodbye!", "Goodbye! Come back soon."),
    (
        "What is speculative decoding?",
        "A small model guesses the next words, and a large model checks them all at once. "
        "The text is the same, but it comes faster.",
    ),
    (
        "What is a draft model?",
        "A draft model is a small and fast model. It guesses the words that the large model will write.",
    ),
    ("Can you sing?", "I cannot sing, but I can tell you a story about a singer."),
]
