"""The prompts of the built-in benchmark: five kinds of work, four prompts each, written for specnb (Apache-2.0)."""

from __future__ import annotations

_CART = """class Cart:
    def __init__(self):
        self.items = []

    def add(self, name, price, count=1):
        self.items.append({"name": name, "price": price, "count": count})

    def total(self):
        result = 0
        for item in self.items:
            result += item["price"] * item["count"]
        return result
"""
_TEMPERATURE = """def celsius_to_fahrenheit(value):
    return value * 9 / 5 + 32


def fahrenheit_to_celsius(value):
    return (value - 32) * 5 / 9


def describe(value):
    if value < 0:
        return "freezing"
    if value < 20:
        return "cool"
    return "warm"
"""
_LOG = """import datetime


def write_log(path, message):
    now = datetime.datetime.now()
    with open(path, "a") as file:
        file.write(f"{now:%Y-%m-%d %H:%M:%S} {message}\\n")


def read_log(path):
    with open(path) as file:
        return [line.rstrip("\\n") for line in file]
"""
_STACK = """class Stack:
    def __init__(self):
        self.values = []

    def push(self, value):
        self.values.append(value)

    def pop(self):
        if not self.values:
            raise IndexError("the stack is empty")
        return self.values.pop()

    def size(self):
        return len(self.values)
"""
_LIGHTHOUSE = (
    "The lighthouse on the northern cape was built in 1874 after three ships were lost on the reef in a single "
    "winter. For eighty years a keeper lived there with his family and lit the lamp every evening. In 1955 the lamp "
    "was replaced by an electric light, and the last keeper moved to the village. Today the lighthouse is a small "
    "museum, and the reef is a place where divers look for what is left of the ships."
)
_HONEY = (
    "Honey bees tell each other where to find flowers by dancing. A bee that comes back to the hive runs in a "
    "straight line, shaking her body, and then circles back. The direction of the line shows the direction of the "
    "flowers, and the length of the shaking shows how far away they are. Other bees follow her in the dark of the "
    "hive and feel the dance with their antennae. Then they fly out and find the flowers by themselves."
)
_RAILWAY = (
    "The mountain railway between Alder and Fern opened in 1912. It climbs 800 metres in 14 kilometres and crosses "
    "23 bridges. In the first years a journey took two hours, and passengers often had to help clear snow from the "
    "tracks. Since 1968 the line has been electric, and the journey takes 40 minutes. Every autumn thousands of "
    "visitors ride the railway to see the forests change colour."
)
_CLAY = (
    "Potters have fired clay for at least twenty thousand years. Raw clay holds water, and while it dries it shrinks "
    "and can crack. When it is heated above 600 degrees it loses the water that is bound in its minerals and can "
    "never become soft again. Above 1200 degrees parts of the clay melt and fill the gaps between the grains, so "
    "that the pot becomes hard and does not let water through."
)


def _edit(code: str, change: str) -> str:
    return f"{change} Answer with the complete code in one block and nothing else.\n\n```python\n{code}```"


def _copy(text: str) -> str:
    return f"Copy this text:\n\n{text}"


def _ask(text: str, question: str) -> str:
    return f"{text}\n\nAnswer with a full sentence from the text: {question}"


PROMPTS: dict[str, tuple[str, ...]] = {
    "edit code": (
        _edit(_CART, "Repeat this Python code with a docstring added to each method."),
        _edit(_TEMPERATURE, "Repeat this Python code exactly as it is."),
        _edit(_LOG, "Repeat this Python code exactly as it is."),
        _edit(_STACK, "Repeat this Python code with a comment above each method."),
    ),
    "summarise": (
        _copy(_LIGHTHOUSE),
        _copy(_HONEY),
        f"Summarise this text in its own words:\n\n{_RAILWAY}",
        _copy(_CLAY),
    ),
    "question": (
        _ask(_LIGHTHOUSE, "When was the lamp replaced by an electric light?"),
        _ask(_HONEY, "What does the direction of the line show?"),
        _ask(_RAILWAY, "How long does the journey take since the line has been electric?"),
        _ask(_CLAY, "What happens to clay above 1200 degrees?"),
    ),
    "open story": (
        "Write a short story about a clockmaker who finds a letter in an old clock.",
        "Write a short story about a girl who learns to speak with crows.",
        "Describe a city in which it never stops raining.",
        "Tell me about an adventure of two brothers on a river.",
    ),
    "chat": (
        "What is a good way to learn to cook?",
        "My plants on the balcony have yellow leaves. What can I do? Give me a list.",
        "Explain to a child why the sky is blue.",
        "Plan three days in a small town by the sea. Use a heading for each day.",
    ),
}
"""Prompts by kind of work."""
