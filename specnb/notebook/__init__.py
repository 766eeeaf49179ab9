"""The IPython extension: `%load_ext specnb`."""

from __future__ import annotations

import re
from typing import Any

_MAGICS = {
    "line": ("specload", "specgen", "specbench", "specpanel", "specmemory", "spectrain"),
    "cell": ("specgen", "specbench", "spectrain"),
}
_KEYS = (
    "%specload",
    "%%specgen",
    "%specgen",
    "%specpanel",
    "%%specbench",
    "%specbench",
    "%specmemory",
    "%%spectrain",
    "%spectrain",
)
_CLASS = "SpecMagics"


_HELP_ALONE = re.compile(rf"%(%({'|'.join(_MAGICS['cell'])})\b.*\s(-h|--help))\s*")


def help_alone(lines: list[str]) -> list[str]:
    """Make a line magic of a cell magic that only asks for help: IPython refuses a cell magic without a body."""
    match = _HELP_ALONE.fullmatch("".join(lines))
    return lines if match is None else [match[1]]


def load_ipython_extension(ip: Any) -> None:
    """Register the magics, their completions, and the hooks that keep cells as typed. Calling it again is safe."""
    from specnb.notebook.magics import SpecMagics

    unload_ipython_extension(ip)
    for refused in remove_invalid_config(SpecMagics, ip.config):
        print(f"{refused} was refused, so it is left out.")
    magics = SpecMagics(ip)
    ip.register_magics(magics)
    ip.input_transformers_cleanup.append(help_alone)
    ip.events.register("pre_run_cell", magics.remember_cell)
    ip.events.register("post_run_cell", magics.forget_cell)
    for key in _KEYS:
        ip.set_hook("complete_command", magics.complete_line, str_key=key)


def remove_invalid_config(kind: Any, config: Any) -> list[str]:
    """Remove invalid values of a Configurable class from a config.

    `%config` keeps a value in the shell's config even if it is invalid, and the extension could not be loaded again.

    Args:
        kind: the Configurable class.
        config: the config; its section for `kind` is changed.

    Returns:
        The removed values, as "Class.name = value".
    """
    from traitlets import TraitError

    section, found = config.get(kind.__name__, {}), []
    for name, trait in kind.class_traits(config=True).items():
        value = section.get(name)
        try:
            if name in section and not (value is None and trait.allow_none):
                trait.validate(None, value)
        except TraitError:
            del section[name]
            found.append(f"{kind.__name__}.{name} = {value!r}")
    return found


def unload_ipython_extension(ip: Any) -> None:
    """Undo what loading the extension registered. The shell keeps the loaded models."""
    manager = ip.magics_manager
    magics = manager.registry.pop(_CLASS, None)
    if magics is None:
        return
    for kind, names in _MAGICS.items():
        for name in names:
            manager.magics[kind].pop(name, None)
    if magics in ip.configurables:
        ip.configurables.remove(magics)
    if help_alone in ip.input_transformers_cleanup:
        ip.input_transformers_cleanup.remove(help_alone)
    for event, callback in (("pre_run_cell", magics.remember_cell), ("post_run_cell", magics.forget_cell)):
        if callback in ip.events.callbacks[event]:
            ip.events.unregister(event, callback)
    dispatcher = ip.strdispatchers.get("complete_command")
    for key in _KEYS:
        chain = dispatcher.strs.get(key) if dispatcher else None
        if chain is not None:
            # set_hook binds each function to the shell
            chain.chain = [
                entry for entry in chain.chain if getattr(entry[1], "__func__", None) != magics.complete_line
            ]
