"""What is drawn: a call, described by plain values, reproducible from a seed and an index."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from families.build import CAUSAL, IMAGE_TEXT, families

from .parts import OWN, WRAPPERS


def _known(kind: str, names: str) -> list[str]:
    """Those families that this version of transformers has."""
    return [name for name in names.split() if name in families(kind)]


DENSE = _known(
    CAUSAL,
    "llama qwen2 qwen3 mistral gemma2 gemma3_text gemma4_text phi3 gpt2 olmo2 cohere2 gpt_neox granite stablelm "
    "smollm3 falcon bloom gpt_neo opt starcoder2",
)
MIXED = _known(
    CAUSAL,
    "glm4_moe deepseek_v3 mixtral qwen3_moe gpt_oss llama4_text mpt phi deepseek_v2 ernie4_5 lfm2 exaone4 dbrx",
)
WITH_IMAGE = _known(
    IMAGE_TEXT,
    "qwen2_vl qwen2_5_vl qwen3_vl gemma3 gemma4 internvl idefics3 smolvlm mistral3 aya_vision glm4v paligemma lfm2_vl "
    "got_ocr2",
)
PAIRS = {"mtp_layers": "tiny-glm4-moe", "gemma4_assistant": "tiny-gemma4", "universal": "tiny-llama"}
TEXT_IDS = (3, 60)  # prompts and special ids stay below those of images


@dataclass(frozen=True)
class Draw:
    """One call of generate() and how specnb is to make it; every field at its default is the simplest."""

    family: str = "llama"
    kind: str = CAUSAL
    image: bool = False
    rows: tuple[tuple[int, ...], ...] = ((5, 17, 23, 42, 5, 17),)
    right: bool = False  # padding on the right
    pad: int = 0  # padding that every row has
    dtype: str = "float32"
    new: int = 12
    options: dict[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()  # stop strings
    as_config: bool = False  # the options in a GenerationConfig of the call's own
    cache: str = "none"  # or empty, filled
    wrapper: str = "none"
    entry: str = "generate"  # or decoder, pipeline
    method: str = "plain"
    drafting: dict[str, Any] = field(default_factory=dict)
    draft: str = "noisy"  # or copy, far, other vocabulary (of EAGLE-3: a smaller one), first layers
    seed: int | None = None  # None: greedy
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def pair(self) -> str | None:
        """The embedded pair that the method needs, instead of a family."""
        return PAIRS.get(self.drafter)

    @property
    def drafter(self) -> str:
        """The method, or of a hybrid its model drafter."""
        return self.method.rpartition("+")[2]


def draw(seed: int, index: int) -> Draw:
    """The draw `index` of a run with the seed."""
    r = random.Random(f"specnb {seed} {index}")
    made = _model(r, Draw())
    made = _prompts(r, made)
    made = _method(r, made)
    made = _options(r, made)
    made = _around(r, made)
    return _sampling(r, made)


def _model(r: random.Random, made: Draw) -> Draw:
    which = r.random()
    if which < 0.55:
        dtype = r.choices(["float32", "bfloat16", "float16", "float64"], [76, 14, 5, 5])[0]
        return replace(made, family=r.choice(DENSE), dtype=dtype)
    if which < 0.7:
        return replace(made, family=r.choice(MIXED))
    if which < 0.8:
        return replace(made, family=r.choice(sorted(families(CAUSAL))))
    if which < 0.95:
        return replace(made, family=r.choice(WITH_IMAGE), kind=IMAGE_TEXT, image=r.random() < 0.8)
    return replace(made, family=r.choice(sorted(families(IMAGE_TEXT))), kind=IMAGE_TEXT, image=r.random() < 0.6)


def _prompts(r: random.Random, made: Draw) -> Draw:
    few = r.sample(range(*TEXT_IDS), r.randint(2, 8))  # few tokens, so that lookup finds matches
    n = 1 if made.image else r.choices([1, 2, 3], [60, 25, 15])[0]
    rows = tuple(tuple(r.choices(few, k=r.randint(1, 16))) for _ in range(n))
    pad = 0 if made.image else r.choices([0, r.randint(1, 4)], [75, 25])[0]
    return replace(made, rows=rows, pad=pad, right=r.random() < 0.05, new=r.randint(1, 20))


def _method(r: random.Random, made: Draw) -> Draw:
    chances = {"plain": 20, "draft_model": 28, "prompt_lookup": 20, "suffix": 8, "early_exit": 14}
    chances |= {"mtp_layers": 3, "gemma4_assistant": 3, "universal": 4, "eagle3": 12, "dflash": 8}
    method = r.choices(list(chances), list(chances.values()))[0]
    models = chances.keys() - {"plain", "prompt_lookup", "suffix"}
    lookup = r.choices(["", "suffix", "prompt_lookup"], [65, 20, 15])[0] if method in models else ""
    drafting: dict[str, Any] = {}
    if method != "plain":
        drafting |= _some(
            r,
            num_assistant_tokens=(0.7, lambda: r.randint(1, 8)),
            num_assistant_tokens_schedule=(0.5, lambda: r.choice(["constant", "heuristic", "adaptive"])),
        )
    if "prompt_lookup" in (method, lookup):
        drafting |= _some(r, max_matching_ngram_size=(0.3, lambda: r.randint(1, 4)))
    if "suffix" in (method, lookup):
        drafting |= _some(
            r,
            suffix_decoding_max_tree_depth=(0.3, lambda: r.randint(1, 20)),
            suffix_decoding_max_spec_factor=(0.3, lambda: r.choice([0.5, 1.0, 8.0])),
            suffix_decoding_min_token_prob=(0.5, lambda: r.choice([0.0, 0.0, 0.5])),
        )
    if method in models:
        drafting |= _some(r, assistant_confidence_threshold=(0.6, lambda: r.choice([0.0, 0.0, 0.2, 0.9])))
    if method == "early_exit":
        drafting["assistant_early_exit"] = r.randint(1, 3)
    draft = r.choice(["copy", "noisy", "noisy", "far", "other vocabulary", "first layers"])
    if method in PAIRS:
        made = replace(made, family="llama", kind=CAUSAL, image=False, dtype="float32")
    if method in ("eagle3", "dflash") and made.family not in DENSE:
        made = replace(made, family=r.choice(DENSE), kind=CAUSAL, image=False)
    return replace(made, method=f"{lookup}+{method}" if lookup else method, drafting=drafting, draft=draft)


def _some(r: random.Random, **choices: tuple[float, Any]) -> dict[str, Any]:
    """Each with its probability."""
    return {name: value() for name, (chance, value) in choices.items() if r.random() < chance}


def _options(r: random.Random, made: Draw) -> Draw:
    ids = lambda n: r.sample(range(*TEXT_IDS), n)  # noqa: E731
    options = _some(
        r,
        eos_token_id=(0.25, lambda: r.choice([r.randint(3, 60), ids(12)])),
        min_new_tokens=(0.08, lambda: r.randint(0, 12)),
        min_length=(0.03, lambda: r.randint(0, 20)),
        repetition_penalty=(0.12, lambda: r.choice([1.3, 0.8, 5.0])),
        no_repeat_ngram_size=(0.1, lambda: r.randint(1, 3)),
        bad_words_ids=(0.06, lambda: [[i] for i in ids(3)] + [ids(2)]),
        suppress_tokens=(0.05, lambda: ids(15)),
        begin_suppress_tokens=(0.05, lambda: ids(30)),
        forced_bos_token_id=(0.02, lambda: ids(1)[0]),
        forced_eos_token_id=(0.04, lambda: ids(1)[0]),
        sequence_bias=(0.05, lambda: [[ids(1), 6.0], [ids(2), -4.0]]),
        encoder_repetition_penalty=(0.03, lambda: 1.4),
        encoder_no_repeat_ngram_size=(0.03, lambda: 2),
        exponential_decay_length_penalty=(0.03, lambda: (3, 1.2)),
        remove_invalid_values=(0.03, lambda: True),
        renormalize_logits=(0.04, lambda: True),
        low_memory=(0.01, lambda: True),
        prefill_chunk_size=(0.03, lambda: r.randint(1, 5)),
        cache_implementation=(
            0.05,
            lambda: r.choice(["dynamic", "static", "offloaded", "quantized", "hybrid", "paged"]),
        ),
        use_cache=(0.02, lambda: r.choice([True, False])),
        return_dict_in_generate=(0.08, lambda: True),
        output_scores=(0.03, lambda: True),
        output_logits=(0.03, lambda: True),
        num_beams=(0.01, lambda: 2),
        guidance_scale=(0.01, lambda: 1.5),
        num_return_sequences=(0.01, lambda: 2),
        temperature=(0.03, lambda: r.choice([0.7, 1.0, 2.0])),
        top_k=(0.02, lambda: 5),
    )
    own: list[str] = []
    if r.random() < 0.3:
        own = r.sample(sorted(OWN), r.choices([1, 2], [80, 20])[0])
        if sum(OWN[name].option == "prefix_allowed_tokens_fn" for name in own) > 1:
            own.pop()
    stop = (
        ["".join(chr(30 + i) for i in ids(r.randint(1, 2))) for _ in range(r.randint(1, 20))]
        if r.random() < 0.06
        else []
    )
    return replace(made, options=options, own=tuple(own), stop=tuple(stop), as_config=r.random() < 0.06)


def _around(r: random.Random, made: Draw) -> Draw:
    wrapper = r.choice(sorted(WRAPPERS)) if r.random() < 0.22 else "none"
    cache = r.choices(["none", "empty", "filled"], [82, 9, 9])[0]
    entry = r.choices(["generate", "decoder", "pipeline"], [50, 38, 12])[0]
    if made.pair is not None:  # with tokenizers of its own
        entry, made = "decoder" if entry == "pipeline" else entry, replace(made, stop=())
    if entry == "pipeline":
        cache, made = "none", replace(made, image=False, pad=0, right=False, stop=(), as_config=False)
    right = made.right and not made.own  # what the user's processors hold would have to be cut to the row alone
    return replace(made, wrapper=wrapper, cache="none" if made.image else cache, entry=entry, right=right)


def _sampling(r: random.Random, made: Draw) -> Draw:
    if r.random() < 0.7:
        return made
    sampling = {"top_k": 1}  # one token left: the text is certain, whatever is drawn
    if r.random() < 0.6:
        sampling = _some(
            r,
            temperature=(0.5, lambda: r.choice([0.3, 0.9, 1.5])),
            top_k=(0.3, lambda: r.choice([0, 2, 10])),
            top_p=(0.3, lambda: r.choice([0.3, 0.9])),
            min_p=(0.15, lambda: 0.1),
            typical_p=(0.1, lambda: 0.8),
            epsilon_cutoff=(0.05, lambda: 0.01),
            eta_cutoff=(0.05, lambda: 0.01),
        )
    drafting = dict(made.drafting)
    if made.method not in ("plain", "suffix") and r.random() < 0.25:
        drafting["verification"] = "block"
    options = {name: value for name, value in made.options.items() if name not in ("temperature", "top_k")}
    return replace(made, seed=r.randint(0, 99), sampling=sampling, drafting=drafting, options=options)
