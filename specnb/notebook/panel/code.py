"""The code of a panel's run: Python, and a `%%specgen` cell, that do the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specnb.notebook.magic_parser import flag


@dataclass(frozen=True)
class Request:
    """A run of the panel.

    Attributes:
        model: name of the pair in the session.
        method: name of the method.
        prompt: text of the prompt.
        options: the options that were set, as arguments of `generate`.
        chat: send the prompt as a chat message.
        system: the system message of the chat.
    """

    model: str
    method: str
    prompt: str
    options: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False
    system: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `generate`, without the prompt."""
        return {"method": self.method, **self.options}


def python_code(request: Request, loaded: Mapping[str, Any] | None) -> str:
    """Python code that repeats a run.

    Args:
        request: the run.
        loaded: the options with which the pair was loaded; None if it was not loaded by the session.
    """
    lines = ["import specnb"]
    if request.chat:
        lines.append("from specnb.text import prompt_inputs")
    if loaded is None:
        lines.append(f"pair = ...  # the pair that the panel calls {request.model!r}")
    else:
        given = "".join(f", {name}={value!r}" for name, value in loaded.items())
        lines.append(f"pair = specnb.load({request.model!r}{given})")
    prompt = repr(request.prompt)
    if request.chat:
        system = f", system={request.system!r}" if request.system is not None else ""
        lines.append(f"inputs = prompt_inputs(pair.tokenizer, {prompt}, chat=True{system}, device=pair.target.device)")
        prompt = "**inputs"
    arguments = "".join(f",\n    {name}={value!r}" for name, value in request.arguments.items())
    lines.append(f"result = specnb.generate(\n    pair,\n    {prompt}{arguments},\n)")
    return "\n".join([*lines, "result"])


def magic_code(request: Request) -> str:
    """A `%%specgen` cell that repeats a run."""
    words = ["%%specgen", f"--model={_quoted(request.model)}", "--chat" if request.chat else "--no-chat"]
    if request.system is not None:
        words.append(f"--system={_quoted(request.system, escape=True)}")
    for name, value in request.arguments.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(name).replace("--", "--no-", 1))
            continue
        for one in value if isinstance(value, (list, tuple)) else [value]:
            words.append(f"{flag(name)}={_quoted(str(one), escape=isinstance(one, str) and name == 'stop_strings')}")
    return f"{' '.join(words)} -o result\n{request.prompt}"


def _quoted(text: str, escape: bool = False) -> str:
    """Quote a text so that `split_line` (with `escape`, also `unescape`) reads it back."""
    if escape:
        for character, sign in (("\\", "\\\\"), ("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r")):
            text = text.replace(character, sign)
    if text and all(c.isalnum() or c in "_-./:,+@" for c in text):
        return text
    if "'" not in text:
        return f"'{text}'"
    inside = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inside}"'
