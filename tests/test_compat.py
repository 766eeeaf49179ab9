"""What happens where a private name of torch or transformers is gone: slower or refused, never an import error."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import tiny
import torch
from checks import plain, spec

import specnb
from specnb import compat
from specnb.runtime import prepacked_linear
from specnb.runtime.prepare import prepare

X = tiny.ids(1, 20)


def test_nothing_is_missing_here() -> None:
    assert compat.missing() == {}


def test_a_name_that_is_gone_is_listed_with_its_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_GONE", {})
    assert compat._get("torch", "ops.mkldnn._never_there", "nothing is packed") is None
    assert compat._get("transformers.never_there", "name", "it is refused") is None
    assert compat.missing() == {
        "torch.ops.mkldnn._never_there": "nothing is packed",
        "transformers.never_there.name": "it is refused",
    }


@pytest.mark.parametrize("gone", ["_REORDER", "_MULTIPLY", "LINEAR", "_HOOKS", "_SDPA", "_ATTENTIONS"])
def test_without_a_name_the_text_is_the_same(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    expected = plain(model, X, max_new_tokens=16)
    monkeypatch.setattr(prepacked_linear, "_pays_from", lambda layer, size: 1)
    specnb.pack(model)
    with_it = prepare(model)[1]
    specnb.unpack(model)
    monkeypatch.setattr(compat, gone, None)
    specnb.pack(model)
    without = prepare(model)[1]
    assert list(spec(model, X, max_new_tokens=16, prompt_lookup_num_tokens=4).ids) == expected
    assert without != with_it


@pytest.mark.slow
def test_importing_needs_none_of_them() -> None:
    """With every private name gone, specnb can be imported and decodes plainly with the same text."""
    code = """
import importlib, torch
from specnb import compat
from specnb.runtime import prepacked_linear
for name in [n for n in vars(compat) if n in GONE]:
    setattr(compat, name, None)
import specnb, specnb.call.api, specnb.bench, specnb.models
"""
    gone = [
        "_REORDER",
        "_MULTIPLY",
        "LINEAR",
        "_HOOKS",
        "_SDPA",
        "_ATTENTIONS",
        "_REGISTER",
        "_MASKS",
        "FIRST_PASS_INPUTS",
    ]
    subprocess.run([sys.executable, "-c", f"GONE = {gone!r}\n{code}"], check=True)


def test_defaults_without_the_private_method(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GenerationConfig

    known = compat.default_generation_params()
    monkeypatch.delattr(GenerationConfig, "_get_default_generation_params")
    assert isinstance(known, dict) and known
    fallback: dict[str, Any] = compat.default_generation_params()
    assert isinstance(fallback, dict)


def test_padding_is_what_generate_pads_with() -> None:
    from transformers import GenerationConfig

    assert compat.pad_token_id(GenerationConfig(pad_token_id=3, eos_token_id=5)) == 3
    assert compat.pad_token_id(GenerationConfig(eos_token_id=[5, 6])) == 5
    assert compat.pad_token_id(GenerationConfig()) == 0
    config = GenerationConfig(pad_token_id=3)
    config._pad_token_tensor = torch.tensor(9)
    assert compat.pad_token_id(config) == 9
