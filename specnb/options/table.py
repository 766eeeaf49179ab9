"""The table of options."""

from __future__ import annotations

from specnb.options.option import Option

MODEL_DRAFTERS = ("draft_model", "early_exit", "mtp_layers", "eagle3", "dflash", "gemma4_assistant", "universal")
"""The methods that draft with a model."""
LOOKUPS = ("prompt_lookup", "suffix")
"""The methods that draft from the text or a memory, without a model."""
NOT_OF_HYBRIDS = ("assistant_ensemble_weight",)
"""Options of its model drafter that a hybrid does not have: tokens from a lookup have no probabilities to mix."""
_DRAFTERS = (*MODEL_DRAFTERS, *LOOKUPS)

OPTIONS: tuple[Option, ...] = (
    Option(
        name="num_assistant_tokens",
        type=int,
        default=5,
        help="tokens drafted per step (the first step's, where a schedule changes it); DFlash drafts a block at most",
        low=1,
        slider=(1, 16),
        methods=_DRAFTERS,
        hint="method='plain' drafts nothing",
    ),
    Option(
        name="num_assistant_tokens_schedule",
        type=str,
        default=None,
        help=(
            "how the draft length changes from step to step: constant; heuristic (+2 when all drafted tokens were "
            "accepted, else -1; heuristic_transient is the same, since every call starts afresh); or adaptive (the "
            "length with the most expected tokens per second, from measured costs and acceptance). Left out: constant "
            "where num_assistant_tokens is given anywhere or drafts are sampled; else heuristic in half precision "
            "(where block sizes may break ties differently, so that with adaptive the text would depend on timing); "
            "else adaptive"
        ),
        choices=("constant", "heuristic", "heuristic_transient", "adaptive"),
        methods=_DRAFTERS,
    ),
    Option(
        name="assistant_confidence_threshold",
        type=float,
        default=0.4,
        help="a draft ends after a token to which the drafter itself gave less than this probability (0: never)",
        low=0,
        high=1,
        slider=(0, 1),
        methods=MODEL_DRAFTERS,
    ),
    Option(
        name="assistant_ensemble_weight",
        type=float,
        default=None,
        help=(
            "static ensemble, LOSSY: drafted positions follow w * target + (1 - w) * draft. The bonus token after a "
            "fully accepted draft is the target's own, and so is the first token with drafters that read the target's "
            "states"
        ),
        low=0,
        low_open=True,
        high=1,
        high_open=True,
        slider=(0.05, 0.95),
        suggested=0.5,
        methods=MODEL_DRAFTERS,
    ),
    Option(
        name="assistant_early_exit",
        type=int,
        default=None,
        help="number of the target's first layers that draft (1 to its layers - 1)",
        slider=(1, 48),
        methods=("early_exit",),
    ),
    Option(
        name="max_matching_ngram_size",
        type=int,
        default=3,
        help="longest suffix that prompt lookup looks for in prompt and output",
        low=1,
        slider=(1, 8),
        methods=("prompt_lookup",),
    ),
    Option(
        name="suffix_decoding_max_tree_depth",
        type=int,
        default=32,
        help="longest match that suffix decoding looks for, and its longest draft, in tokens (vLLM: 24)",
        low=1,
        slider=(1, 64),
        methods=("suffix",),
    ),
    Option(
        name="suffix_decoding_max_spec_factor",
        type=float,
        default=3.0,
        help="a draft is at most this factor times the length of the match (vLLM: 1)",
        low=0,
        low_open=True,
        slider=(0.5, 8),
        methods=("suffix",),
    ),
    Option(
        name="suffix_decoding_min_token_prob",
        type=float,
        default=0.1,
        help="a draft ends where the estimated probability that all of it is accepted falls below this (0: never)",
        low=0,
        high=1,
        slider=(0, 1),
        methods=("suffix",),
    ),
    Option(
        name="verification",
        type=str,
        default="token",
        help="acceptance rule when sampling: token by token, or the whole block at once (never accepts fewer)",
        choices=("token", "block"),
        methods=(*MODEL_DRAFTERS, "prompt_lookup"),  # with blocks, a memory would change what is sampled
    ),
    Option(
        name="max_new_tokens",
        type=int,
        default=None,
        help="most tokens to generate",
        low=1,
        slider=(1, 512),
        group="length",
        hint="left out, the model's own setting holds; for no new tokens, make no call",
    ),
    Option(
        name="min_new_tokens",
        type=int,
        default=None,
        help="the text cannot end before this many tokens",
        low=0,
        slider=(0, 256),
        group="length",
    ),
    Option(
        name="max_time",
        type=float,
        default=None,
        help="seconds after which generation stops",
        low=0,
        low_open=True,
        group="length",
        hint="left out, there is no limit",
    ),
    Option(
        name="stop_strings",
        type=str,
        default=None,
        help="text that ends the generation; may be given several times",
        multiple=True,
        group="length",
    ),
    Option(
        name="do_sample",
        type=bool,
        default=None,
        help="sample instead of taking the most probable token (greedy)",
        group="sampling",
    ),
    Option(
        name="temperature",
        type=float,
        default=None,
        help="divides the logits: below 1 sharper, above 1 flatter; 0 is greedy",
        low=0,
        slider=(0, 2),
        suggested=1.0,
        group="sampling",
    ),
    Option(
        name="top_k",
        type=int,
        default=None,
        help="sample among the k most probable tokens (0: all)",
        low=0,
        slider=(0, 200),
        suggested=50,
        group="sampling",
        hint="0 takes all",
    ),
    Option(
        name="top_p",
        type=float,
        default=None,
        help="sample among the fewest tokens that hold this probability",
        low=0,
        high=1,
        slider=(0.05, 1),
        suggested=0.9,
        group="sampling",
        hint="1 takes all",
    ),
    Option(
        name="min_p",
        type=float,
        default=None,
        help="sample among tokens with at least this share of the best token's probability",
        low=0,
        high=1,
        slider=(0, 1),
        suggested=0.05,
        group="sampling",
    ),
    Option(
        name="repetition_penalty",
        type=float,
        default=None,
        help="above 1: tokens already in the text become less probable",
        low=0,
        low_open=True,
        slider=(0.8, 2),
        suggested=1.1,
        group="sampling",
    ),
    Option(
        name="no_repeat_ngram_size",
        type=int,
        default=None,
        help="no n-gram of this size occurs twice (0: off)",
        low=0,
        slider=(0, 8),
        suggested=3,
        group="sampling",
    ),
    Option(
        name="seed",
        type=int,
        default=None,
        help="seed of this call's random numbers; None draws one and reports it",
        low=0,
        high=2**63 - 1,
        group="sampling",
    ),
    Option(
        name="logprobs",
        type=bool,
        default=True,
        help="record each generated token's log-probability under the target (Step.logprobs)",
        group="trace",
    ),
    Option(
        name="top_logprobs",
        type=int,
        default=0,
        help="record this many of the most probable tokens of target and drafter at each position (0: none)",
        low=0,
        high=20,
        slider=(0, 20),
        group="trace",
    ),
)
"""The options, in the order in which they are listed."""
BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}
"""The options by name."""

OPTIONS_OF_REGISTERED = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_ensemble_weight",
    "verification",
)
"""The options that every registered drafter has beside its own."""
