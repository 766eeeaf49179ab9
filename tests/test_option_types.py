"""The types that editors check options by are those of the option table."""

from __future__ import annotations

import typing

import specnb
from specnb.call.option_types import DraftingOptions, GenerateOptions
from specnb.options import ASKED_BY, OPTIONS
from tools import option_types


def test_the_types_are_those_of_the_table() -> None:
    """`python -m tools.option_types` writes them anew."""
    assert option_types.PLACE.read_text(encoding="utf-8") == option_types.source()
    assert option_types.TRAINING_PLACE.read_text(encoding="utf-8") == option_types.training_source()


def test_every_option_has_a_type() -> None:
    drafting = {option.name for option in OPTIONS if option.group == "drafting"} | ASKED_BY.keys()
    assert DraftingOptions.__annotations__.keys() == drafting
    parameters = specnb.generate.__annotations__.keys()
    assert {option.name for option in OPTIONS} <= GenerateOptions.__annotations__.keys() | parameters
    unpacked = typing.get_type_hints(specnb.decoder, localns={"PreTrainedTokenizerBase": object}, include_extras=True)
    assert typing.get_args(unpacked["options"]) == (DraftingOptions,)
