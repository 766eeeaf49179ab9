"""Layouts of pixels that image-text models of transformers take: tensors by the names of the forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Pixels:
    """One layout: `make(seed)` gives its tensors; `tokens` how many image tokens it takes, None where it is asked of the model."""

    name: str
    make: Callable[[int], dict[str, Tensor]]
    tokens: int | None = None


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layouts(model: PreTrainedModel) -> Iterator[Pixels]:
    """Candidates for the model, the likeliest first."""
    takes = set(inspect.signature(type(model).forward).parameters)
    vision = _vision(model.config)
    if "flattened_patches" in takes:
        yield from _flattened(model.config)
    if "aspect_ratio_ids" in takes:
        yield _tiles(vision)
    if "image_grid_thw" in takes:
        yield from _grids(vision, takes)
    if "image_position_ids" in takes:
        yield from _positioned(vision)
    if "spatial_shapes" in takes:
        yield _spatial(vision)
    if "target_sizes" in takes:
        yield from _target_sizes(vision)
    if "image_patches" in takes:
        yield from _fuyu(model.config)
    if "pixel_values_local" in takes:
        yield from _local(vision)
    yield from _squares(vision, takes)


def _vision(config: Any) -> Any:
    for name in ("vision_config", "vision_tower_config", "vq_config", "perceiver_config", "vit_config"):
        found = getattr(config, name, None)
        if found is not None:
            return found
    return config


def _number(config: Any, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):
            value = value[0]
        if isinstance(value, int):
            return value
    return default


def _patch(vision: Any) -> int:
    return _number(vision, "patch_size", "spatial_patch_size", default=8)


def _channels(vision: Any) -> int:
    return _number(vision, "in_channels", "num_channels", "in_chans", default=3)


def _grids(vision: Any, takes: set[str]) -> Iterator[Pixels]:
    """Patches `[patches, values]` or `[patches, channels, size, size]` of a grid of 4 by 4."""
    grid, patch, channels = 4, _patch(vision), _channels(vision)
    more = {"image_merge_sizes": torch.tensor([2])} if "image_merge_sizes" in takes else {}
    more = {"image_grid_thw": torch.tensor([[1, grid, grid]])} | more
    frames = dict.fromkeys((_number(vision, "temporal_patch_size", default=1), 1, 2))
    shapes: list[tuple[int, ...]] = [(n * channels * patch * patch,) for n in frames]
    shapes += [(channels, patch, patch), *((channels, n, patch, patch) for n in frames)]
    for shape in shapes:
        yield Pixels(
            f"grid {shape}", lambda seed, shape=shape: {"pixel_values": _random(seed, grid * grid, *shape), **more}
        )
    tile = (2 * patch, 2 * patch, channels)  # four patches side by side
    yield Pixels(f"grid {tile}", lambda seed: {"pixel_values": _random(seed, grid * grid, *tile), **more})


def _squares(vision: Any, takes: set[str]) -> Iterator[Pixels]:
    """One or several square images, as a batch of images or of rows of images."""
    size, channels = _number(vision, "image_size", "img_size", "resolution", default=32), _channels(vision)
    known = {
        "image_sizes": torch.tensor([[size, size]]),
        "high_res_pixel_values": _random(5, 1, channels, size, size),
        "pixel_attention_mask": torch.ones(
            1, 1, *([] if "tile_fine_mask" in takes else [size, size]), dtype=torch.bool
        ),
        "qformer_input_ids": torch.tensor([[4, 8, 15]]),
    }
    given = {name: value for name, value in known.items() if name in takes}
    for more in ({}, given) if given else ({},):
        for shape in ((1, channels, size, size), (1, 1, channels, size, size), (1, 2, channels, size, size)):
            yield Pixels(
                f"square {shape} {list(more)}",
                lambda seed, shape=shape, more=more: {"pixel_values": _random(seed, *shape).clamp(-1, 1), **more},
            )


def _positioned(vision: Any) -> Iterator[Pixels]:
    """Flat patches with their places (Gemma 4)."""
    patch, pool = _patch(vision), _number(vision, "pooling_kernel_size", default=1)
    for side in dict.fromkeys((2 * pool, 4, 6)):
        places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1).reshape(
            1, -1, 2
        )
        for width in dict.fromkeys((3 * patch * patch, _number(vision, "model_patch_size", default=patch) ** 2 * 3)):
            yield Pixels(
                f"patches {side}x{side} of {width}",
                lambda seed, side=side, width=width, places=places: {
                    "pixel_values": _random(seed, 1, side * side, width).sigmoid(),
                    "image_position_ids": places,
                },
            )


def _spatial(vision: Any) -> Pixels:
    """Flat patches with a mask and their numbers down and across (LFM2-VL)."""
    width = _channels(vision) * _patch(vision) ** 2
    fixed = {"spatial_shapes": torch.tensor([[4, 4]]), "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long)}
    return Pixels("spatial", lambda seed: {"pixel_values": _random(seed, 1, 16, width), **fixed})


def _target_sizes(vision: Any) -> Iterator[Pixels]:
    """Patches of all images side by side (MiniCPM-V)."""
    patch, channels = _patch(vision), _channels(vision)
    for side in (4, 8):
        for tokens in dict.fromkeys((side * side // 16, side * side // 4)):
            yield Pixels(
                f"strip {side} ({tokens})",
                lambda seed, side=side: {
                    "pixel_values": _random(seed, 1, channels, patch, side * side * patch),
                    "target_sizes": torch.tensor([[side, side]]),
                },
                tokens,
            )


def _flattened(config: Any) -> Iterator[Pixels]:
    """Rows of patches with their place in front (Kosmos 2.5)."""
    vision = _vision(config)
    width = _number(vision, "patch_embed_hidden_size", default=3 * _patch(vision) ** 2)
    tokens = _number(config, "latent_query_num", default=16)

    def make(seed: int) -> dict[str, Tensor]:
        places = torch.tensor([[1 + i // 2, 1 + i % 2] for i in range(4)]).float()
        return {"flattened_patches": torch.cat([places, _random(seed, 4, width)], -1)[None]}

    yield Pixels("flattened", make, tokens)


def _tiles(vision: Any) -> Pixels:
    """Tiles of one image (Mllama)."""
    tiles, size = _number(vision, "max_num_tiles", default=2), _number(vision, "image_size", default=32)
    fixed = {
        "aspect_ratio_ids": torch.tensor([[2]]),
        "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
    }
    return Pixels("tiles", lambda seed: {"pixel_values": _random(seed, 1, 1, tiles, 3, size, size), **fixed}, 1)


def _fuyu(config: Any) -> Iterator[Pixels]:
    """Patches that are image tokens themselves (Fuyu): the ids are placeholders."""
    width = config.patch_size**2 * config.num_channels
    for name in ("pixel_values", "image_patches"):
        yield Pixels(name, lambda seed, name=name: {name: _random(seed, 1, 4, width)}, 4)


def _local(vision: Any) -> Iterator[Pixels]:
    """A whole view and no local ones, or two (Step 3.7, DeepSeek-OCR 2)."""
    sizes = dict.fromkeys((_number(vision, "image_size", default=32), 32, 64))
    for size in sizes:
        whole = {"num_local_patches": torch.tensor([0])}
        yield Pixels(
            f"whole {size}",
            lambda seed, size=size, whole=whole: {"pixel_values": _random(seed, 1, 3, size, size), **whole},
        )
        yield Pixels(f"only {size}", lambda seed, size=size: {"pixel_values": _random(seed, 1, 3, size, size)})
