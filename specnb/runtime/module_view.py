"""A view of a model: a second module tree over the same weights, with some modules replaced.

The model that it is made from is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb import compat

M = TypeVar("M", bound=nn.Module)


def check_model(model: Any, function: str) -> None:
    """Raise ValueError for what is not a model of transformers."""
    if not isinstance(model, PreTrainedModel):
        hint = f": give {function}(pair.target)" if hasattr(model, "target") else ""
        raise ValueError(f"{function}() takes a model of transformers, not a {type(model).__name__}{hint}.")


def module_view(model: M, replaced: Mapping[str, nn.Module]) -> M:
    """`model` with the submodules at the paths in `replaced` exchanged; all else and all weights are the same objects.

    Only the modules on the way to a replaced one are copied, without their children. The view shows the model as it is
    at this moment. It is made anew for every generation, so that it follows what was done to the model in between.

    Raises:
        ValueError: the forward of a module on the way was replaced on the instance. That function would go on using
            the modules that it knows.
    """
    copies: dict[str, nn.Module] = {"": _shell(model)}
    for path, module in replaced.items():
        names = path.split(".")
        for depth in range(1, len(names)):
            here = ".".join(names[:depth])
            if here not in copies:
                parent = copies[".".join(names[: depth - 1])]
                copies[here] = _shell(parent._modules[names[depth - 1]])
                parent._modules[names[depth - 1]] = copies[here]
        copies[".".join(names[:-1])]._modules[names[-1]] = module
    for shell in copies.values():
        shell.__dict__.update(shell._modules)  # found there faster than by nn.Module.__getattr__
    return copies[""]  # type: ignore[return-value]


def forward_replaced(module: nn.Module) -> bool:
    """Whether a forward was set on the instance by something other than accelerate."""
    return "forward" in vars(module) and compat.HOOK[0] not in vars(module)


def unpatched(modules: Iterable[nn.Module]) -> bool:
    """Whether no module has a forward of its own: accelerate's, which moves weights, a compiled one, or any other."""
    return not any("forward" in vars(module) or compat.is_compiled(module) for module in modules)


def with_replacements(model: M, find: Callable[[Mapping[str, nn.Module]], Mapping[str, nn.Module]]) -> M:
    """A view of `model` with the replacements that `find` has for its modules, by path.

    It is the model itself where there are none, or where a module is not `unpatched`.
    """
    modules = dict(model.named_modules())
    replaced = find(modules) if unpatched(modules.values()) else {}
    return module_view(model, replaced) if replaced else model


def _shell(module: Any) -> Any:
    """A shallow copy with a table of children of its own, and without what accelerate set on the instance."""
    if forward_replaced(module):
        raise ValueError(
            f"the forward of a {type(module).__name__} was replaced by another function, so its parts cannot run one "
            "by one. Use a method that runs the model as a whole (draft model, prompt lookup), or subclass instead."
        )
    shell = object.__new__(type(module))
    shell.__dict__.update(module.__dict__, _modules=dict(module._modules))
    for name in (*compat.HOOK, "forward", compat.COMPILED, *shell._modules):
        shell.__dict__.pop(name, None)
    return shell


def layers_path(model: PreTrainedModel) -> str:
    """The path of the decoder's list of layers. Raises ValueError where there is no such list."""
    config = model.config.get_text_config(decoder=True)
    depth = config.num_hidden_layers
    try:
        decoder = model.get_decoder()
    except AttributeError as error:
        raise ValueError(f"{type(model).__name__} does not say where its decoder is ({error}).") from error
    stacks = [(name, module) for name, module in decoder.named_modules() if isinstance(module, nn.ModuleList)]
    lists = [(name, module) for name, module in stacks if len(module) == depth]
    if not lists:  # some count two sublayers per layer
        lists = [(name, module) for name, module in stacks if len(module) == getattr(config, "num_layers", 0)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no plain stack of {depth} decoder layers.")
    found = min(lists, key=lambda item: item[0].count("."))[1]
    return str(next(name for name, module in model.named_modules() if module is found))


class Replacement(nn.Module):
    """Takes the place of a layer in a view; attributes that it does not have are the layer's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a child: nothing is registered twice
        self.__dict__["_parameters"] = layer._parameters  # models read dtype and device from their parameters

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)


class LinearReplacement(nn.Linear):
    """Takes the place of an `nn.Linear` and is one, for code that checks the type of a module's children."""

    def __init__(self, layer: nn.Linear) -> None:
        self.__dict__.update(layer.__dict__, layer=layer)  # its parameters and sizes


class Skip(Replacement):
    """Returns its input: a layer that is left out."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The input."""
        return hidden_states


class Capture(Replacement):
    """Runs the layer and keeps its output in `value`."""

    value: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output."""
        self.value = self.__dict__["layer"](*args, **kwargs)
        return self.value


class Inject(Replacement):
    """Returns `value` instead of what the layer would compute."""

    value: Any = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The value."""
        return self.value
