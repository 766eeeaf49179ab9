"""A panel's run as code: the Python and the `%%specgen` cell that do the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specnb.notebook.magic_parser import flag


@dataclass(frozen=True)
class Request:
    """What a press of Run asks for. `options` are arguments of `generate`: those that were set."""

    model: str
    method: str
    prompt: str
    options: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False
    system: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `generate` beside the prompt."""
        return {"method": self.method, **self.options}


def python_code(request: Request, loaded: Mapping[str, Any] | None) -> str:
    """Python that repeats the run. `loaded` is what the model was loaded with; None if it was made elsewhere."""
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
    """The `%%specgen` cell that repeats the run."""
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
    """A word that `arguments.split_line` (and, with `escape`, `unescape`) reads back as `text`."""
    if escape:
        for character, sign in (("\\", "\\\\"), ("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r")):
            text = text.replace(character, sign)
    if text and all(c.isalnum() or c in "_-./:,+@" for c in text):
        return text
    if "'" not in text:
        return f"'{text}'"
    inside = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inside}"'
