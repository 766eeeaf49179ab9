"""What `%%specbench` does: set up the runs, compare them, and show their progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from IPython.display import display

from specnb.notebook.availability import available_methods, reason_against
from specnb.notebook.stream import ProgressLine, is_notebook
from specnb.options import drafting_options, method_names

_COMPARE_ARGUMENTS = ("repeats", "transformers", "chat", "system")


class Benchmark:
    """A comparison of methods, as `%%specbench` runs it.

    Args:
        pair: the `Pair` to run.
        prompts: texts of the prompts.
        options: the arguments that were typed on the line.

    Raises:
        ValueError: the pair cannot run what is asked for.
    """

    def __init__(self, pair: Any, prompts: Sequence[str], options: Mapping[str, Any]) -> None:
        given = dict(options)
        methods, vary = given.pop("methods", []), given.pop("vary", None)
        self.pair, self.prompts = pair, prompts
        self.settings = {name: given.pop(name) for name in _COMPARE_ARGUMENTS if name in given}
        self.runs = runs(pair, methods, vary, given)
        drafting = {option for method in method_names() for option in drafting_options(method)}
        self.settings |= {name: value for name, value in given.items() if name not in drafting}

    def run(self, shell: Any, live: bool = True, quiet: bool = False) -> tuple[KeyboardInterrupt | None, Any]:
        """Run the comparison and show it.

        Args:
            shell: the IPython shell.
            live: show progress while it runs.
            quiet: show nothing.

        Returns:
            The interrupt, if there was one, and the comparison of the complete rounds (None without any).
        """
        from specnb.bench import compare

        notebook = is_notebook(shell)
        shown = display(ProgressLine("warming up ..."), display_id=True) if notebook and live and not quiet else None

        def show_progress(done: int, total: int, label: str) -> None:
            if shown is not None:
                shown.update(ProgressLine(f"{done} of {total} runs done, now: {label}"))

        interrupt: KeyboardInterrupt | None = None
        found: Any = None
        try:
            found = compare(self.pair, list(self.prompts), self.runs, on_run=show_progress, **self.settings)
        except KeyboardInterrupt as stop:
            interrupt, found = stop, getattr(stop, "partial_result", None)
        except BaseException:
            if shown is not None:
                shown.update(ProgressLine("ended with an error."))
            raise
        if shown is not None:
            shown.update(
                found if found is not None else ProgressLine("interrupted before the first round was complete.")
            )
        elif found is not None and not quiet:
            display(found) if notebook else print(found.text())
        return interrupt, found


def runs(
    pair: Any, methods: Sequence[str], vary: tuple[Any, list[Any]] | None, given: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The runs of a comparison, as arguments of `generate`.

    Args:
        pair: the `Pair` to run.
        methods: names of the methods; empty means all that the pair can run.
        vary: an option and its values. Methods that have the option run once per value.
        given: options; each goes to the methods that have it.

    Raises:
        ValueError: the pair cannot run a method, or no method has an option.
    """
    possible = available_methods(pair)
    for name in methods:
        if (reason := reason_against(possible, name)) is not None:
            raise ValueError(f"{pair.name or 'this pair'} cannot run {name}: {reason}.")
    own = {name: drafting_options(name) for name in (*possible, *methods)}
    exits = "assistant_early_exit" in given or (vary is not None and vary[0].name == "assistant_early_exit")
    chosen = list(methods) or [
        name
        for name, reason in possible.items()
        if reason is None and name != "plain" and (exits or name != "early_exit")
    ]
    drafting = {name: value for name, value in given.items() if any(name in names for names in own.values())}
    for name in [*drafting, *([vary[0].name] if vary else [])]:
        if not any(name in own[method] for method in chosen):
            raise ValueError(f"none of the compared methods ({', '.join(chosen)}) has the option {name}.")
    found: list[dict[str, Any]] = []
    for method in chosen:
        base = {"method": method, **{name: value for name, value in drafting.items() if name in own[method]}}
        varied = vary is not None and vary[0].name in own[method]
        found += [{**base, vary[0].name: value} for value in vary[1]] if vary and varied else [base]
    return found


def split_prompts(body: str) -> list[str]:
    """The prompts in the body of a cell: the parts between lines of three dashes, without empty ones."""
    prompts: list[list[str]] = [[]]
    for line in body.split("\n"):
        if line.strip() == "---":
            prompts.append([])
        else:
            prompts[-1].append(line)
    return [text for text in ("\n".join(lines) for lines in prompts) if text.strip()]
