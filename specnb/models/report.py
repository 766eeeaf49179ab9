"""Checks that a model has exactly the tensors of its checkpoint, from transformers' loading report.

MTP layers are left out, since they are read separately.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from specnb.models.errors import LoadError

_LOGGER = "transformers.modeling_utils"
_MAX_LISTED = 4  # tensors that a message lists, of each kind
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CONVERSION = re.compile(r"^\s*(\S+)\s*\| CONVERSION", re.MULTILINE)
_MTP = re.compile(r"^(.*\blayers\.\d+)\.(enorm|hnorm|eh_proj|shared_head)\b")
_COMPUTED_BUFFERS = re.compile(
    r"(^|\.)(inv_freq|(cos|sin)_cached|position_ids|masked_bias|causal_mask|version|_float_tensor"
    r"|embed_positions\.weights|(attn|attention|self_attn|self_attention)\.bias)$"
)
"""Buffers that older versions of transformers stored and newer ones compute."""
_QUANTISATION_TENSORS = re.compile(
    r"(scale|scales|zero_point|zeros|g_idx|_packed|_shape|absmax|quant_map|quant_state\..*)$"
)
"""Tensors that quantised checkpoints store beside the weights, and that not every reader uses."""


class LoadReport(logging.Filter):
    """A logging filter that holds back transformers' loading report until `check` has seen the tensors."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self._level = level
        self._held: list[logging.LogRecord] = []
        self._judged = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Hold back the loading report; other records pass as they did before."""
        held = "LOAD REPORT" in record.getMessage() and not self._judged
        if held:
            self._held.append(record)
        return not held and record.levelno >= self._level

    def check(self, name: str, model: Any, info: Mapping[str, Any]) -> None:
        """Check the tensors. A report that only lists MTP layers is dropped.

        Args:
            name: the name of the model, for messages.
            model: the loaded model.
            info: the loading info of `from_pretrained`.

        Raises:
            LoadError: tensors are missing, have another size, or have no place in the model.
        """
        wrong = _mismatches(model, info)
        if wrong:
            self._held.clear()
            raise mismatch_error(name, wrong)
        if not _unexpected_keys(model, info["unexpected_keys"]):
            self._held.clear()

    def failed(self, name: str) -> LoadError | None:
        """The error for tensors that transformers could not convert, which only the report names; None without any."""
        for record in self._held:
            text = _ANSI.sub("", record.getMessage())
            names = sorted(set(_CONVERSION.findall(text)))
            if names:
                reason = re.search(r"^RuntimeError: (.*)$", text, re.MULTILINE)
                said = f" ({reason[1].rstrip('. ')})" if reason else ""
                self._held.clear()
                return mismatch_error(name, [f"what belongs to {_listed(names)} does not fit together{said}"])
        return None

    def release(self) -> None:
        """Log the report if it was held back and not dropped."""
        self._judged = True
        for record in self._held:
            if record.levelno >= self._level:
                logging.getLogger(_LOGGER).handle(record)


@contextmanager
def load_report(name: str) -> Iterator[LoadReport]:
    """Hold back transformers' report while a model is loaded. It is read even if the user disabled its log level.

    Args:
        name: the name of the model, for messages.

    Yields:
        The filter, whose `check` must be called with the loaded model.

    Raises:
        LoadError: transformers could not convert tensors.
    """
    logger = logging.getLogger(_LOGGER)
    own = logger.level
    report = LoadReport(logger.getEffectiveLevel())
    logger.addFilter(report)
    # below WARNING: at WARNING itself, transformers also logs messages about tensor parallelism
    logger.setLevel(min(logging.WARNING - 1, logger.getEffectiveLevel()))
    try:
        yield report
    except RuntimeError as error:
        if (failed := report.failed(name)) is None:
            raise
        raise failed from error
    finally:
        report.release()
        logger.setLevel(own)
        logger.removeFilter(report)


def mismatch_error(name: str, wrong: Sequence[str]) -> LoadError:
    """The error for weights that do not match the config. `wrong` lists the differences."""
    return LoadError(
        f"{name!r} cannot be loaded, since its weights and its config do not fit: {'; '.join(wrong)}. Get the model "
        "again, whole, with the config that belongs to these weights; weights that are not there are not made up."
    )


def _mismatches(model: Any, info: Mapping[str, Any]) -> list[str]:
    missing = sorted(key for key in info["missing_keys"] if not _COMPUTED_BUFFERS.search(key))
    surplus = sorted(key for key in _unexpected_keys(model, info["unexpected_keys"]) if _has_place(model, key))
    sized = sorted((key, list(there), list(wanted)) for key, there, wanted in info["mismatched_keys"])
    found = [f"{key} is {there}, the config asks for {wanted}" for key, there, wanted in sized[:_MAX_LISTED]]
    if len(sized) > _MAX_LISTED:
        found.append(f"{len(sized) - _MAX_LISTED} more tensors have other sizes")
    if missing:
        found.append(f"there is no {_listed(missing)}")
    if surplus:
        found.append(f"the config has no place for {_listed(surplus)}")
    return found + [" ".join(str(message).split()) for message in info["error_msgs"]]


def _unexpected_keys(model: Any, keys: Sequence[str]) -> list[str]:
    """The unexpected tensors that do not belong to MTP layers."""
    text = model.config.get_text_config(decoder=True)
    first, count = getattr(text, "num_hidden_layers", 0), getattr(text, "num_mtp_layers", None) or 0
    declared = re.compile(rf"(^|\.)layers\.({'|'.join(str(first + i) for i in range(count)) or '-'})\.")
    blocks = tuple(f"{found[1]}." for key in keys if (found := _MTP.match(key)))  # declared or not
    return [key for key in keys if not declared.search(key) and not key.startswith(blocks)]


def _has_place(model: Any, key: str) -> bool:
    """Whether a tensor belongs to a part that the model has, so that the text would change without it.

    Tensors of parts that the model does not have may be left out, such as a value head or a vision tower.
    """
    if _COMPUTED_BUFFERS.search(key) or (
        getattr(model.config, "quantization_config", None) is not None and _QUANTISATION_TENSORS.search(key)
    ):
        return False
    parts = key.removeprefix(f"{model.base_model_prefix}.").split(".")
    base = model.base_model
    return any(getattr(owner, parts[0], None) is not None for owner in (base, model)) and len(parts) > 1


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_LISTED]) + (
        f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    )
