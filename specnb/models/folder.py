"""Finds the model in a local folder, and says what to do if there is none."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specnb.models.errors import LoadError, error_summary, unknown_name

_WEIGHTS = re.compile(r"(pytorch_)?model(-[^.]*)?\.(safetensors|bin)")
_TOKENIZER = re.compile(r"(tokenizer|vocab|merges|tekken|spiece|sentencepiece).*", re.IGNORECASE)
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_AGAIN = "Get the folder again, whole"
_LFS = b"version https://git-lfs"


def find_model(name: str) -> tuple[Path, str]:
    """Find the model that a path stands for.

    Args:
        name: path of a model folder, of a GGUF file, or of a folder with one.

    Returns:
        The model folder or GGUF file, and a note for the card (may be empty).

    Raises:
        LoadError: there is no such model, or its files are damaged or missing.
    """
    path = Path(name).expanduser()
    if not path.exists():
        raise unknown_name(name, "no such file or folder")
    if not path.is_dir():
        if path.suffix.lower() != ".gguf":
            raise LoadError(f"{name!r} is neither a folder nor a .gguf file.")
        return _gguf(name, [path]), ""
    files = sorted(entry.name for entry in path.iterdir())
    if "adapter_config.json" in files:
        raise adapter_error(name, _json(name, path / "adapter_config.json"))
    if "config.json" in files and _has_weights(name, path, files):
        return path, ""
    quantised = [path / file for file in files if file.lower().endswith(".gguf")]
    models = [file for file in quantised if not _is_projector(file)]
    if models or quantised:
        beside = ", ".join(file.name for file in quantised if file not in models)
        note = f"\nText only: {beside}, for images or sound, is not used." if beside else ""
        return _gguf(name, models or quantised), note
    raise _no_model(name, files)


def has_tokenizer(place: str) -> bool:
    """Whether a model folder has tokenizer files."""
    return any(_TOKENIZER.fullmatch(entry.name) for entry in Path(place).iterdir())


def adapter_error(name: str, config: Any) -> LoadError:
    """The error for a folder or hub model that is an adapter. `config` is its adapter_config.json."""
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    kind = f"{config['peft_type']} adapter" if isinstance(config, dict) and config.get("peft_type") else "adapter"
    load = f"specnb.load({base!r})" if base else "specnb.load(BASE)"
    return LoadError(
        f"{name!r} holds an {kind}{f' for {base!r}' if base else ''}, not a model: load the model that it was made "
        f"for, then add the adapter with peft: pair = {load}; pair.target.load_adapter({name!r})."
    )


def _has_weights(name: str, path: Path, files: Sequence[str]) -> bool:
    """Whether the folder has weights that transformers finds. LoadError if some of the files are missing."""
    weights = [file for file in files if _WEIGHTS.fullmatch(file)]
    for file in ("config.json", "generation_config.json"):
        if file in files:
            config = _json(name, path / file)
            if file == "config.json" and (own := config.get("transformers_weights")):
                return (path / str(own)).exists()
    for index in (file for file in files if file.endswith((".safetensors.index.json", ".bin.index.json"))):
        _check_shards(name, path, index, files)
        weights = [file for file in weights if file.endswith(".bin") or "safetensors" in index] or [index]
    shards = [file for file in weights if _SHARD.search(file)]
    single = [file for file in weights if file not in shards]
    if shards and not single and not any(file.endswith(".index.json") for file in files):
        suffix = "model.safetensors" if shards[0].endswith(".safetensors") else "pytorch_model.bin"
        raise LoadError(
            f"the folder {name!r} holds parts of the weights ({_listed(shards)}) without {suffix}.index.json, which "
            f"says what is where. {_AGAIN}."
        )
    for file in weights:
        check_weights_file(name, path / file)
    return bool(weights)


def _check_shards(name: str, path: Path, index: str, files: Sequence[str]) -> None:
    listed = _json(name, path / index).get("weight_map")
    if not isinstance(listed, dict):
        raise LoadError(f"{index} of {name!r} lists no tensors (weight_map). {_AGAIN}.")
    missing = sorted({str(file) for file in listed.values()} - set(files))
    if missing:
        raise LoadError(
            f"the folder {name!r} is not whole: {index} lists {_listed(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not there. {_AGAIN}."
        )


def check_weights_file(name: str, path: Path) -> None:
    """Check that a weights file can be read.

    Args:
        name: the name of the model, for the message.
        path: the file.

    Raises:
        LoadError: the file is a placeholder of git-lfs, damaged, or cut off.
    """
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise LoadError(
                f"{path.name} of {name!r} is a placeholder of git-lfs, not the file itself: run `git lfs pull` in the "
                "folder, or get it again."
            )
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise LoadError(
                f"{name!r} cannot be loaded: {path.name} is damaged or cut off ({error_summary(error)}). {_AGAIN}."
            ) from error


def _json(name: str, path: Path) -> Any:
    """The contents of a JSON file, which must be an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also raised for text that is not UTF-8
        with path.open("rb") as file:
            pointer = file.read(len(_LFS)) == _LFS
        what = (
            "a placeholder of git-lfs (run `git lfs pull` in the folder)"
            if pointer
            else f"not JSON ({error_summary(error)})"
        )
        raise LoadError(f"{name!r} cannot be loaded: {path.name} is {what}. {_AGAIN}.") from error
    if not isinstance(found, dict):
        raise LoadError(
            f"{name!r} cannot be loaded: {path.name} holds a {type(found).__name__}, not settings. {_AGAIN}."
        )
    return found


def _is_projector(file: Path) -> bool:
    """Whether a GGUF file is a projector for images or sound, which llama.cpp stores beside the model."""
    return "mmproj" in file.name.lower()


def _gguf(name: str, files: Sequence[Path]) -> Path:
    """The only file of `files`. LoadError if it is a projector or a part of a model, or if there are several."""
    first = files[0]
    split = _SPLIT.fullmatch(first.name)
    stems = {part[1] if (part := _SPLIT.fullmatch(file.name)) else file.name for file in files}
    if len(stems) == 1 and split and int(split[3]) > 1:
        whole = f"{split[1]}.gguf"
        raise LoadError(
            f"{name!r} is a GGUF model in {int(split[3])} parts, which transformers cannot read: put them together "
            f"with llama.cpp's `llama-gguf-split --merge {split[1]}-00001-of-{split[3]}.gguf {whole}` and load {whole}."
        )
    if len(files) == 1 and _is_projector(first):
        raise LoadError(
            f"{name!r} {'holds only ' + first.name if name != str(first) else 'is the part'} for images or sound of a "
            "model, not the model: give the .gguf file of the model itself."
        )
    if len(files) > 1:
        raise LoadError(
            _folder_error(name, "several .gguf files (give the path of one)", [file.name for file in files])
        )
    return first


def _no_model(name: str, files: Sequence[str]) -> LoadError:
    if "params.json" in files or any(file.startswith("consolidated") for file in files):
        return LoadError(
            f"the folder {name!r} is in the format of Mistral's or Meta's own code (params.json, consolidated.*), not "
            "in transformers': get the version of the model that has config.json and model*.safetensors (most hub "
            "pages have both), or convert it with transformers."
        )
    return LoadError(_folder_error(name, "no config.json with weights", files))


def _folder_error(name: str, missing: str, files: Sequence[str]) -> str:
    here = "are " + _listed(files, 20) if files else "is nothing"
    return (
        f"the folder {name!r} holds {missing}. A model folder has config.json and model.safetensors (or "
        "pytorch_model.bin; or parts and their index), as save_pretrained() writes it, or one .gguf file; "
        f"here {here}."
    )


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
