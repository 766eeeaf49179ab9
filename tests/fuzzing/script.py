"""A draw as the source of a script that stands alone; what the fuzzer runs is what it prints."""

from __future__ import annotations

import pprint
from functools import cache
from typing import Any

import transformers
from families.build import CAUSAL, build, families
from families.images import image_inputs
from torch import Tensor

from .draws import Draw
from .parts import OWN, WRAPPERS

VOCAB = 99
_HEAD = """import contextlib, copy, inspect, os, warnings
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch, transformers, specnb
from transformers import (
    DynamicCache, EosTokenCriteria, GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, MaxLengthCriteria,
    PreTrainedTokenizerFast, StoppingCriteria, pipeline,
)
warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
torch.manual_seed(0)
inf = float("inf")
"""
_MODEL = """CONFIG = {config}
def base(seed=0):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = transformers.{name}({config_class}.from_dict(copy.deepcopy(CONFIG)))
    with torch.no_grad():
        for p in m.parameters():
            if p.is_floating_point():
                drawn = torch.randn(p.shape, generator=g) * 0.2
                p.copy_(drawn if p.dim() > 1 else p.nan_to_num() if p.any() else p + 0.1)
    m.generation_config.update(eos_token_id=None, pad_token_id=0, bos_token_id=1)
    return m.to(torch.{dtype}).eval()
"""
_PAIR = """def base(seed=0):
    return specnb.load({name!r}{assistant}).target
"""
_TOKENIZER = """from tokenizers import Tokenizer, decoders, models, pre_tokenizers
chars = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(30 + i): i for i in range(3, 97)}, "\u0120": 97, "\u010a": 98}
letters = Tokenizer(models.BPE(vocab=chars, merges=[]))
letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
letters.decoder = decoders.ByteLevel()
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>", pad_token="<pad>", padding_side="left")
"""
_DRAFTS = {
    "copy": "base()",
    "noisy": "noisy(base())",
    "far": "base(5)",
    "first layers": "specnb.truncate(base(), 2)",
    "other vocabulary": (
        "LlamaForCausalLM(LlamaConfig(vocab_size=120, hidden_size=16, intermediate_size=32, num_hidden_layers=1, "
        "num_attention_heads=2, initializer_range=0.3)).eval()"
    ),
}
_NOISY = """def noisy(m):
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in m.parameters():
            if p.is_floating_point() and p.dim() > 1: p.add_((torch.randn(p.shape, generator=g) * 0.03).to(p.dtype))
    return m
"""
_DRAFTERS = {
    "eagle3": """def eagle3(m, small):
    from specnb.training.drafter import default_layers, new_drafter
    known = torch.arange(3, 60) if small else torch.arange(m.config.get_text_config(decoder=True).vocab_size)
    return new_drafter(m, default_layers(m), known, 1, 0).to(m.dtype).eval()
""",
    "dflash": """def dflash(m, small):
    from specnb.models.dflash import DFlashDrafter, dflash_config
    text = m.config.get_text_config(decoder=True)
    n = text.num_hidden_layers
    shape = dict(vocab_size=text.vocab_size, hidden_size=text.hidden_size, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, rms_norm_eps=1e-6)
    own = dict(mask_token_id=5, target_layer_ids=[0, n // 2, n - 1])
    made = DFlashDrafter(dflash_config(dict(shape, architectures=["DFlashDraftModel"], model_type="qwen3",
        rope_theta=1e4, num_target_layers=n, block_size=6, dflash_config=own)))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "o_proj" in name or "down_proj" in name: p.mul_(0.03)
    return made.to(m.dtype).eval()
""",
}


def source(draw: Draw) -> str:
    """The script: functions that make everything afresh, and at its end both texts."""
    parts = [OWN[name] for name in draw.own]
    blocks = [_HEAD, _model(draw)]
    if draw.drafter == "draft_model" and draw.draft == "noisy":
        blocks.append(_NOISY)
    blocks += [_DRAFTERS[draw.drafter]] if draw.drafter in _DRAFTERS else []
    if draw.entry == "pipeline" or draw.stop:
        blocks.append(_TOKENIZER)
    blocks += [_prompt(draw), *dict.fromkeys(part.source for part in parts if part.source)]
    blocks += [_wrapped(draw), _options(draw), _calls(draw), _END]
    return "".join(block if block.endswith("\n") else block + "\n" for block in blocks)


def _model(draw: Draw) -> str:
    if draw.pair is not None:
        assistant = ', "tiny-gemma4-assistant"' if draw.drafter == "gemma4_assistant" else ""
        return _PAIR.format(name=draw.pair, assistant=assistant)
    config, name = _config(draw.family, draw.kind)
    return _MODEL.format(config=config, name=name, config_class=_config_class(draw.family, draw.kind), dtype=draw.dtype)


@cache
def _built(family: str, kind: str) -> Any:
    return build(family, kind)


@cache
def _config(family: str, kind: str) -> tuple[str, str]:
    """The configuration's source, as short as it gives the same back, and the model's class."""
    config = _built(family, kind).config
    short = config.to_diff_dict()
    if type(config).from_dict(dict(short)).to_dict() != config.to_dict():
        short = config.to_dict()
    short = {
        name: value for name, value in short.items() if name not in ("transformers_version", "architectures", "dtype")
    }
    return pprint.pformat(short, width=150, compact=True, sort_dicts=False), families(kind)[family]


def _config_class(family: str, kind: str) -> str:
    config_class = type(_built(family, kind).config)
    if hasattr(transformers, config_class.__name__):
        return f"transformers.{config_class.__name__}"
    return f"__import__({config_class.__module__!r}, fromlist=['x']).{config_class.__name__}"


@cache
def _image(family: str, kind: str) -> dict[str, Tensor]:
    return image_inputs(_built(family, kind))


def _prompt(draw: Draw) -> str:
    """X and M, ROWS and WIDTH, and `MORE`, what comes with an image."""
    if draw.image:
        tensors = dict(_image(draw.family, draw.kind))
        ids, mask = tensors.pop("input_ids").tolist(), tensors.pop("attention_mask").tolist()
        more = ", ".join(f"{name}={_tensor(value, i)}" for i, (name, value) in enumerate(tensors.items()))
    else:
        width = max(map(len, draw.rows)) + draw.pad
        gaps = [width - len(row) for row in draw.rows]
        sides = [(0, gap) if draw.right else (gap, 0) for gap in gaps]
        ids = [[0] * left + list(row) + [0] * right for row, (left, right) in zip(draw.rows, sides, strict=True)]
        mask = [[0] * left + [1] * len(row) + [0] * right for row, (left, right) in zip(draw.rows, sides, strict=True)]
        more = ""
    extra = 5 if draw.cache == "filled" else 0
    return (
        f"X = torch.tensor({ids})\nM = torch.tensor({mask})\nMORE = dict({more})\n"
        f"ROWS, WIDTH = {len(ids)}, {len(ids[0]) + extra}\n"
    )


def _tensor(value: Tensor, seed: int) -> str:
    if value.is_floating_point() and value.numel() > 40:
        return f"torch.randn({tuple(value.shape)}, generator=torch.Generator().manual_seed({seed}))"
    return f"torch.tensor({value.tolist()})"


def _wrapped(draw: Draw) -> str:
    around = 'torch.autocast("cpu", torch.bfloat16)' if draw.wrapper == "autocast" else "contextlib.nullcontext()"
    made = f"def model():\n    m = base()\n    torch.manual_seed(1)\n{WRAPPERS[draw.wrapper]}    return m\n"
    return made + f"def around():\n    return {around}\n"


def _options(draw: Draw) -> str:
    """`options()` for both sides, `inputs(m)` with whatever cache."""
    lists: dict[str, list[str]] = {}
    for name in draw.own:
        lists.setdefault(OWN[name].option, []).append(OWN[name].make)
    own = [f"{name}={made[0] if name.endswith('_fn') else '[' + ', '.join(made) + ']'}" for name, made in lists.items()]
    plain = {"max_new_tokens": draw.new, "do_sample": draw.seed is not None} | draw.sampling | draw.options
    named = ", ".join(f"{name}={value!r}" for name, value in plain.items())
    given = ", ".join([f"generation_config=GenerationConfig({named})" if draw.as_config else named, *own])
    text = f"def options():\n    return dict({given})\n"
    text += "def inputs(m):\n    given = dict(input_ids=X.clone(), attention_mask=M.clone(), **copy.deepcopy(MORE))\n"
    name = 'next(n for n in ("cache", "past_key_values") if n in inspect.signature(type(base()).forward).parameters)'
    if draw.cache == "empty":
        text += f"    given[{name}] = DynamicCache(config=m.config)\n"
    elif draw.cache == "filled":
        text += (
            "    out = m.generate(**given, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)\n"
            "    given['input_ids'] = torch.cat([out.sequences, X[:, :2].repeat(1, 2)[:, :2]], 1)\n"
            "    new = torch.ones(ROWS, given['input_ids'].shape[1] - M.shape[1], dtype=M.dtype)\n"
            "    given['attention_mask'] = torch.cat([M, new], 1)\n"
            f"    given[{name}] = out.past_key_values\n"
        )
    return text + "    return given\n"


def _how(draw: Draw) -> str:
    """What `helpers()` gives: the arguments by which specnb is told the method."""
    given = []
    if draw.drafter in _DRAFTERS:
        given.append(f"assistant_model={draw.drafter}(base(), small={draw.draft == 'other vocabulary'})")
    elif draw.drafter == "draft_model":
        given.append(f"assistant_model={_DRAFTS[draw.draft]}")
    elif draw.drafter == "mtp_layers":
        given.append("use_mtp=True")
    elif draw.drafter == "gemma4_assistant":
        given.append('assistant_model=specnb.load("tiny-gemma4", "tiny-gemma4-assistant").assistant')
    elif draw.drafter == "universal":
        given.append(
            'assistant_model=specnb.load("tiny-llama-other").target, tokenizer=specnb.load("tiny-llama").tokenizer, '
            'assistant_tokenizer=specnb.load("tiny-llama-other").tokenizer'
        )
    if draw.method in ("plain", "prompt_lookup", "suffix") or "+" in draw.method:
        given.append(f'method="{draw.method}"')
    given += [f"{name}={value!r}" for name, value in draw.drafting.items()]
    if draw.stop:
        given.append(f"stop_strings={list(draw.stop)}, tokenizer=TOKENIZER")
    if draw.seed is not None:
        given.append(f"seed={draw.seed}")
    return ", ".join(given)


def _calls(draw: Draw) -> str:
    """`theirs` and `ours`, each with the model and what it is given; the draft model is made before."""
    stop = f", stop_strings={list(draw.stop)}, tokenizer=TOKENIZER" if draw.stop else ""
    if draw.entry == "pipeline":
        texts = ["".join(chr(30 + i) for i in row) for row in draw.rows]
        call = (
            f"pipeline('text-generation', model=m, tokenizer=TOKENIZER)({texts}, batch_size=ROWS, return_tensors=True"
        )
        theirs = f"return {call}, **options())"
        ours = f"return {call}, custom_generate=specnb.decoder(**helpers, on_step=on_step), **options())"
    elif draw.entry == "decoder":
        theirs = f"return m.generate(**given, **options(){stop})"
        ours = "return m.generate(**given, **options(), custom_generate=specnb.decoder(**helpers, on_step=on_step))"
    else:
        theirs = f"return m.generate(**given, **options(){stop})"
        ours = "return specnb.generate(m, **given, **options(), **helpers, on_step=on_step)"
    return (
        f"def helpers():\n    torch.manual_seed(2)\n    return dict({_how(draw)})\n"
        f"def theirs(m, given, helpers=None, on_step=None):\n    with around():\n        {theirs}\n"
        f"def ours(m, given, helpers, on_step=None):\n    with around():\n        {ours}\n"
        "def tokens(out, given):\n"
        "    if isinstance(out, list):\n        return [list(one[0]['generated_token_ids']) for one in out]\n"
        "    return getattr(out, 'sequences', out)[:, given['input_ids'].shape[1] :].tolist()\n"
    )


_END = """
if __name__ == "__main__":
    for call in (theirs, ours):
        m = model()
        given = inputs(m)
        print(call.__name__, tokens(call(m, given, helpers()), given))
"""
__all__ = ["CAUSAL", "VOCAB", "source"]
