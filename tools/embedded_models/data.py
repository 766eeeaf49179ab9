"""The training text: a seeded program that writes short chats in simple English and code.

Stories, questions about a text, summaries, edits of texts and code, lists, instructions and small talk. What is chosen
follows from what was said before wherever that reads well (a fox lives in the forest, a bell is rung), so that little
models can learn it. An eighth of all combinations never appears in training; `held_out=True` writes only those.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import NamedTuple

from tools.embedded_models import words


class Message(NamedTuple):
    """What one of the two says: "user" or "assistant"."""

    role: str
    content: str


KINDS = {
    "story": 5,
    "question": 3,
    "summary": 3,
    "rename": 4,
    "replace": 3,
    "list": 2,
    "steps": 2,
    "code": 1,
    "fact": 1,
    "talk": 1,
}
"""What a chat is about, and how often."""

EDITS = KINDS | {"story": 4, "rename": 14, "replace": 9}
"""The same with more edits, which are the hardest to learn: for the second part of a training."""


class Writer:
    """Writes chats; the same `seed` writes the same ones."""

    def __init__(self, seed: int, held_out: bool = False, kinds: Mapping[str, int] = KINDS) -> None:
        self.random, self.held_out, self.kinds = random.Random(seed), held_out, kinds

    def chat(self, kind: str | None = None) -> list[Message]:
        """A chat of one or two turns; `kind` is a key of KINDS, drawn if left out."""
        kind = kind or self.random.choices(list(self.kinds), list(self.kinds.values()))[0]
        turns: list[str] = getattr(self, f"_{kind}")()
        return [Message("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(turns)]

    # ---- choices
    def _mostly(self, *options: str) -> str:
        """One of `options`, the first much more often than the others."""
        return self.random.choices(options, [0.45**i for i in range(len(options))])[0]

    def _combination(self, *lists: Collection[object]) -> list[int]:
        """An index into each list, from the part of the combinations that this writer may use."""
        while True:
            at = [self.random.randrange(len(options)) for options in lists]
            if (sum((3 * i + 1) * a for i, a in enumerate(at)) % 8 == 0) == self.held_out:
                return at

    # ---- stories
    def _tale(self) -> tuple[words.Animal, words.Thing, str, str, str]:
        """An animal, a thing, a plot, the animal's name and the story."""
        a, t, p = self._combination(words.ANIMALS, words.THINGS, words.PLOTS)
        animal, thing, plot = words.ANIMALS[a], words.THINGS[t], list(words.PLOTS)[p]
        friend = words.ANIMALS[(a + 3 * t + p + 1) % len(words.ANIMALS)]
        if friend is animal:
            friend = words.ANIMALS[(a + 1) % len(words.ANIMALS)]
        name = animal.name if self.random.random() < 0.7 else self.random.choice(words.PEOPLE)
        parts = [self._mostly(*options) for options in words.PLOTS[plot]]
        text = " ".join(parts).format(
            animal=animal.kind,
            name=name,
            home=animal.home,
            trait=animal.trait,
            food=animal.food,
            thing=thing.name,
            look=thing.look,
            a_look=article(thing.look),
            place=thing.place,
            use=thing.use,
            friend=friend.kind,
            friendly=friend.trait,
        )
        return animal, thing, plot, name, text

    def _story(self) -> list[str]:
        animal, thing, plot, name, text = self._tale()
        ask = self._mostly(
            "Tell me a story about a {} who {} a {}.",
            "Write a short story about a {} who {} a {}.",
            "Please tell a story about a {} who {} a {}.",
        )
        turns = [ask.format(animal.kind, plot, thing.name), text]
        if self.random.random() < 0.3:
            turns += self.random.choice(
                [
                    ["Who was the story about?", f"The story was about {name} the {animal.kind}."],
                    [f"What did the {thing.name} look like?", f"The {thing.name} was {thing.look}."],
                    [f"Where did {name} live?", f"{name} lived {animal.home}."],
                    ["Thank you!", "You are welcome! I am glad you liked the story."],
                ]
            )
        return turns

    # ---- a text about somebody
    def _person(self) -> tuple[str, dict[str, str]]:
        """A short text and what it says, as answers by question."""
        n, j, h = self._combination(words.PEOPLE, words.JOBS, words.HOUSES)
        name, job, house = words.PEOPLE[n], words.JOBS[j], words.HOUSES[h]
        drink, pet = self.random.choice(words.DRINKS), self.random.choice(words.PETS)
        day, goal = self.random.choice(words.DAYS), self.random.choice(words.GOALS)
        facts = [
            ("What is the job of {n}?", f"{name} is a {job}."),
            ("Where does {n} live?", f"{name} lives {house}."),
            ("What does {n} drink?", f"Every morning {name} drinks {drink}."),
            ("Which pet does {n} have?", f"{name} has a {pet}."),
            ("Where does {n} go on {d}?", f"On {day} {name} goes to the {goal}."),
        ]
        middle = facts[2:4]
        self.random.shuffle(middle)
        facts = facts[:2] + middle + facts[4:]
        return " ".join(fact for _, fact in facts), {q.format(n=name, d=day): fact for q, fact in facts}

    def _question(self) -> list[str]:
        text, answers = self._person()
        asked = self.random.sample(list(answers), self.random.choice((1, 1, 2)))
        turns = [f"Read this text: {text}\nQuestion: {asked[0]}", answers[asked[0]]]
        return turns + [part for question in asked[1:] for part in (question, answers[question])]

    def _summary(self) -> list[str]:
        ask = self._mostly("Summarise this text: {}", "Write a summary of this text: {}", "Make this text shorter: {}")
        if self.random.random() < 0.5:
            text, answers = self._person()
            facts = list(answers.values())
            name = facts[0].split()[0]
            short = f"{facts[0][:-1]} who {facts[1].removeprefix(name).strip()} {facts[-1]}"
        else:
            animal, thing, plot, name, text = self._tale()
            short = f"{name} the {animal.kind} {words.ENDS[plot]}"
            short = short.format(name=name, thing=f"{article(thing.look)} {thing.name}", bare=thing.name)
        return [ask.format(text), short]

    # ---- edits
    def _rename(self) -> list[str]:
        """A function gets another name, or a number another value."""
        c, n, k = self._combination(words.CODE, words.IDENTIFIERS, range(8))
        code, new, number = words.CODE[c], words.IDENTIFIERS[n], str(2 + k)
        names = self.random.sample([w for w in words.IDENTIFIERS if w != new], 3)
        before = code.format(*names, number=number)
        named = code.split()[0] in ("def", "class")
        if named and ("{number}" not in code or self.random.random() < 0.6):
            after = code.format(new, *names[1:], number=number)
            ask = self._mostly(f"Rename {names[0]} to {new} in this code:", f"Change the name {names[0]} to {new}:")
        else:
            other = str(2 + (k + self.random.randrange(1, 8)) % 8)
            after = code.format(*names, number=other)
            ask = self._mostly(f"Change {number} to {other} in this code:", f"Replace {number} by {other}:")
        return [f"{ask}\n```\n{before}\n```", f"```\n{after}\n```"]

    def _replace(self) -> list[str]:
        if self.random.random() < 0.5:
            animal, _, _, _, text = self._tale()
            old, others = animal.kind, [a.kind for a in words.ANIMALS if f" {a.kind} " not in text and a is not animal]
            new = self.random.choice(others)
            changed = text.replace(f" {old}", f" {new}")
            ask = f"Tell this story with a {new} instead of a {old}: "
        else:
            text, _ = self._person()
            old = text.split()[0]
            new = self.random.choice([p for p in words.PEOPLE if p != old])
            changed = text.replace(old, new)
            ask = f"Change {old} to {new} in this text: "
        return [ask + text, changed]

    # ---- knowledge of a small world
    def _list(self) -> list[str]:
        kind, count = self.random.choice(list(words.LISTS)), self.random.randrange(3, 7)
        number = ("three", "four", "five", "six")[count - 3]
        ask = self._mostly(f"List {number} {kind}.", f"Write a list of {number} {kind}.", f"Name {number} {kind}.")
        return [ask, "\n".join(f"{i}. {item}" for i, item in enumerate(words.LISTS[kind][:count], 1))]

    def _steps(self) -> list[str]:
        task = self.random.choice(list(words.STEPS))
        ask = self._mostly(f"How do I {task}?", f"Tell me how to {task}.", f"Please explain how to {task}.")
        start = f"Here is how to {task}:"
        return [ask, "\n".join([start, *(f"{i}. {step}" for i, step in enumerate(words.STEPS[task], 1))])]

    def _code(self) -> list[str]:
        task = self.random.choice(list(words.TASKS))
        ask = self._mostly(f"Write a function that {task}.", f"I need a Python function that {task}.")
        return [ask, f"```\n{words.TASKS[task]}\n```"]

    def _fact(self) -> list[str]:
        animal, word = self.random.choice(words.ANIMALS), self.random.choice(list(words.OPPOSITES))
        return list(
            self.random.choice(
                [
                    (f"Where does a {animal.kind} live?", f"A {animal.kind} lives {animal.home}."),
                    (f"What does a {animal.kind} eat?", f"A {animal.kind} likes to eat {animal.food}."),
                    (f"What is the opposite of {word}?", f"The opposite of {word} is {words.OPPOSITES[word]}."),
                ]
            )
        )

    def _talk(self) -> list[str]:
        turns: list[str] = []
        for question, answer in self.random.sample(words.TALK, self.random.choice((1, 1, 2))):
            turns += [question, answer]
        return turns


def article(word: str) -> str:
    """The word with "a" or "an" before it."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


FRESH = ("story", "question", "summary", "rename", "replace")
"""The kinds in which some combinations never appear in training."""


def held_out(count: int, seed: int = 7) -> list[tuple[str, str]]:
    """Prompts that appear in no training text, each with the answer it calls for: `count` of each kind in FRESH."""
    writer = Writer(seed, held_out=True)
    chats = [writer.chat(kind)[:2] for kind in FRESH for _ in range(count)]
    return [(asked.content, answer.content) for asked, answer in chats]
