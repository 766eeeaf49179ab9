"""Which methods a pair can run, and why it cannot run the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specnb.options import MODEL_DRAFTERS, method_names, parts_of

_NO_DRAFT = "there is no draft model: load the pair with one (%specload NAME --assistant OTHER)"


def available_methods(pair: Any) -> dict[str, str | None]:
    """Which methods a pair can run. The models themselves are not run.

    Args:
        pair: a `Pair`.

    Returns:
        For every method, None if the pair can run it, else the reason why it cannot; and the hybrids of suffix decoding
        with a model drafter that it can run.
    """
    from specnb import drafters
    from specnb.call import unsupported
    from specnb.call.method_selection import takes_assistant
    from specnb.models.mtp import num_mtp_layers

    try:
        unsupported.check_model(pair.target, {})
    except ValueError as error:
        return dict.fromkeys(method_names(), str(error))
    reasons: dict[str, str | None] = dict.fromkeys(method_names())
    layers = getattr(pair.target.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if layers < 2:
        reasons["early_exit"] = f"the target has {layers} layer, so none can leave early"
    if not num_mtp_layers(pair.target):
        reasons["mtp_layers"] = "the target's checkpoint has no multi-token-prediction layers"
    elif not pair.target.config.name_or_path:
        reasons["mtp_layers"] = "the target was not loaded from a checkpoint, so its MTP layers cannot be read"
    fitting, why = None, _NO_DRAFT
    try:
        fitting = drafters.assistant_method(pair.target, pair.assistant, pair.tokenizer, pair.assistant_tokenizer)
    except ValueError as error:
        why = str(error)
    for name in reasons:
        if takes_assistant(name) and name != fitting:
            reasons[name] = why if fitting is None else _OTHER_METHOD[name].format(fitting)
    hybrids = [f"suffix+{name}" for name in MODEL_DRAFTERS if name != "early_exit" and reasons[name] is None]
    return reasons | dict.fromkeys(hybrids)


def reason_against(reasons: Mapping[str, str | None], method: str) -> str | None:
    """Why a pair cannot run a method, or one of the parts of a hybrid; None if it can.

    Args:
        reasons: those of `available_methods`.
    """
    return next((reason for part in parts_of(method) if (reason := reasons[part]) is not None), None)


_OTHER_METHOD = {
    "draft_model": "the draft model is of another kind or has another tokenizer; it is for {0} and suffix+{0}",
    "universal": "the draft model has the target's tokenizer or reads its states; it is for {0} and suffix+{0}",
    "eagle3": "the draft model is not an EAGLE-3 drafter; it is for {0} and suffix+{0}",
    "dflash": "the draft model is not a DFlash drafter; it is for {0} and suffix+{0}",
    "gemma4_assistant": "the draft model is not a Gemma 4 assistant; it is for {0} and suffix+{0}",
}
