"""The magics `%specload`, `%%specgen`, `%%specbench`, `%specmemory` and `%specpanel`."""

from __future__ import annotations

import os
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand
from traitlets import Bool, Enum, Int
from traitlets import default as trait_default

from specnb.models.embedded import DEFAULT
from specnb.models.registry import REGISTERED
from specnb.notebook.arguments import (
    specbench_parser,
    specgen_parser,
    specload_parser,
    specmemory_parser,
    specpanel_parser,
    spectrain_parser,
)
from specnb.notebook.benchmark import Benchmark, split_prompts
from specnb.notebook.cell_text import exact_body, expand
from specnb.notebook.magic_parser import complete
from specnb.notebook.magic_support import Interrupted, no_weight_bars, read, usage_errors
from specnb.notebook.memory_actions import manage_memory
from specnb.notebook.session import LAST, LAST_BENCH, Session
from specnb.notebook.stream import RECORDED, View, view_for
from specnb.notebook.training import LAST_TRAINING, TrainingPage, train, training_data
from specnb.options import MAGIC_MAX_NEW_TOKENS, METHOD_WITHOUT_DRAFT_MODEL, method_info, selectable_methods
from specnb.text import prompt_inputs


class _MethodName(Enum):
    """The name of a method. Which ones there are changes with the registered drafters."""

    values = property(lambda self: selectable_methods(), lambda self, given: None)


@magics_class
class SpecMagics(Magics):
    """The magics and their defaults.

    `%config SpecMagics` lists the defaults, and `%config SpecMagics.max_new_tokens = 64` sets one.
    """

    method: Any = _MethodName(
        [],
        default_value=None,
        allow_none=True,
        help=f"Method of %%specgen; None: the one that fits the draft model, {METHOD_WITHOUT_DRAFT_MODEL} without one.",
    ).tag(config=True)
    max_new_tokens: Any = Int(
        MAGIC_MAX_NEW_TOKENS,
        allow_none=True,
        min=1,
        help="Default of --max-new-tokens; None: the model's own setting.",
    ).tag(config=True)
    live: Any = Bool(help="Show the text while it is generated. Off when the environment has SPECNB_LIVE=0.").tag(
        config=True
    )

    def __init__(self, shell: Any) -> None:
        super().__init__(shell=shell)
        self.session = Session.for_shell(shell)
        # The running cell as typed, followed by the cells that it runs itself (%%capture does)
        self._cells: list[str] = []

    @trait_default("live")
    def _live_default(self) -> bool:
        return os.environ.get("SPECNB_LIVE", "1") != "0"

    # ---- hooks, registered by load_ipython_extension
    def remember_cell(self, info: Any) -> None:
        """Keep the cell as typed. IPython strips `>>>` and `In [1]:` from bodies and adds a line break."""
        self._cells.append(info.raw_cell or "")

    def forget_cell(self, _result: Any) -> None:
        """Drop the cell that `remember_cell` kept last."""
        del self._cells[-1:]

    def complete_line(self, _shell: Any, event: Any) -> list[str]:
        """Complete flags and their values."""
        magic = event.line.lstrip().lstrip("%")
        make = next((make for name, make in _PARSERS.items() if magic.startswith(name)), specgen_parser)
        return complete(make(), event.text_until_cursor, event.symbol, self.session.pairs)

    # ---- magics
    @no_var_expand
    @line_magic
    def specload(self, line: str) -> None:
        options = read(specload_parser, line)
        if options is None:
            return
        dropped, listed, name = options.pop("drop", None), options.pop("list", False), options.pop("name", None)
        output = options.pop("output", None)
        if name is None and options:
            raise UsageError("%specload: give the model's NAME before its options.")
        if dropped is not None:
            with usage_errors():
                self.session.pair(dropped)
            self.session.drop(dropped)
        if name is not None or not (dropped or listed):
            self._load(name, options)
        if output:
            with usage_errors():
                self.shell.user_ns[output] = self.session.pair()
        if listed or dropped:
            for key, pair in self.session.pairs.items():
                print(f"{'*' if key == self.session.current else ' '} {key}: {pair!r}")
            if not self.session.pairs:
                print("no model is loaded")
        if listed or (name is None and not dropped):
            print(f"Known names: {', '.join(REGISTERED)}; or any hub id, folder or .gguf file.")

    def _load(self, name: str | None, options: dict[str, Any]) -> None:
        """Load the named pair, or the default one, and print its description."""
        if name is None:
            name, options["assistant"] = DEFAULT
            print(f"No name was given, so this is: %specload {name} --assistant {options['assistant']}")
        elif options.get("assistant", "").isdecimal():
            options["assistant"] = int(options["assistant"])
        with usage_errors(), no_weight_bars():
            self.session.load(name, **options)
        print(self.session.pair().describe())

    @no_var_expand
    @line_cell_magic
    def specgen(self, line: str, cell: str | None = None) -> None:
        options = read(specgen_parser, line)
        if options is None:
            return
        body = exact_body(line, cell or "", self._cells)
        if not body.strip():
            raise UsageError(
                "%%specgen: the cell has no prompt: write it below the %%specgen line (%specgen -h lists the options)."
            )
        if options.pop("expand", False):
            body = expand(body, self.shell.user_ns)
        names = ("method", "model", "output", "quiet", "chat", "system", "no_memory", "interactive")
        own = {key: options.pop(key, None) for key in names}
        with usage_errors():
            pair = self.session.pair(own["model"])
            device = getattr(pair.target, "device", None)
            inputs = prompt_inputs(pair.tokenizer, body, chat=own["chat"], system=own["system"], device=device)
        method = own["method"] or self.method  # None: the method that fits the draft model
        if pair.assistant is None:
            method = method or METHOD_WITHOUT_DRAFT_MODEL
        if method and "assistant_model" in method_info(method).needs and pair.assistant is None:
            raise UsageError(f"method {method!r} needs a draft model: %specload {pair.name} --assistant NAME")
        if self.max_new_tokens is not None:
            options.setdefault("max_new_tokens", self.max_new_tokens)
        if own["interactive"]:
            options = RECORDED | options
        show = (self.live, bool(own["interactive"]), self.session.plain_run)
        view = None if own["quiet"] else view_for(self.shell, pair.tokenizer, *show)
        remember = not own["no_memory"]
        options |= self.session.drafts_from(pair, method) if remember else {}
        self._generate(pair, view, own["output"], remember, method=method, **inputs, **options)

    @no_var_expand
    @line_cell_magic
    def specbench(self, line: str, cell: str | None = None) -> None:
        options = read(specbench_parser, line)
        if options is None:
            return
        prompts = split_prompts(exact_body(line, cell or "", self._cells, "%%specbench"))
        if not prompts:
            raise UsageError(
                "%%specbench: the cell has no prompt: write one below the line, or several with lines of --- between."
            )
        output, quiet = options.pop("output", None), options.pop("quiet", False)
        if self.max_new_tokens is not None:
            options.setdefault("max_new_tokens", self.max_new_tokens)
        with usage_errors():
            pair = self.session.pair(options.pop("model", None))
            work = Benchmark(pair, prompts, options)
            interrupted, found = work.run(self.shell, self.live, quiet)
        if found is not None:
            self._assign(found, LAST_BENCH, output)
        if interrupted is not None:
            kept = (
                f"{found.repeats} complete rounds, kept in {output or LAST_BENCH}" if found else "no round was complete"
            )
            raise Interrupted(f"{kept}.") from interrupted

    @no_var_expand
    @line_cell_magic
    def spectrain(self, line: str, cell: str | None = None) -> None:
        options = read(spectrain_parser, line)
        if options is None:
            return
        own = {key: options.pop(key, None) for key in ("model", "output", "quiet", "prompts", "texts", "held_out")}
        if "out" not in options:
            raise UsageError("%%spectrain: name the folder of the drafter: --out DIR.")
        with usage_errors():
            pair = self.session.pair(own["model"])
            data = training_data(exact_body(line, cell or "", self._cells, "%%spectrain"), own, self.shell.user_ns)
            try:
                result = train(pair, TrainingPage(self.shell, bool(own["quiet"]), self.live), data, options)
            except KeyboardInterrupt as interrupt:
                result = getattr(interrupt, "partial_result", None)
                if result is not None:
                    self._assign(result, LAST_TRAINING, own["output"])
                kept = (
                    "nothing was trained yet" if result is None else f"the best drafter so far is in {options['out']}"
                )
                raise Interrupted(f"{kept}.") from interrupt
        self._assign(result, LAST_TRAINING, own["output"])
        self.session.add(result.pair)

    @no_var_expand
    @line_magic
    def specpanel(self, line: str) -> Any:
        options = read(specpanel_parser, line)
        if options is None:
            return None
        from specnb.notebook.panel import Panel

        with usage_errors():
            pair = self.session.pair(options["name"]) if "name" in options else None
            return Panel(pair, session=self.session, method=self.method)

    @no_var_expand
    @line_magic
    def specmemory(self, line: str) -> None:
        options = read(specmemory_parser, line)
        if options is None:
            return
        with usage_errors():
            manage_memory(self.session, options)

    def _generate(self, pair: Any, view: View | None, output: str | None, remember: bool, **options: Any) -> None:
        import specnb

        try:
            with usage_errors():
                result = specnb.generate(pair, on_step=view.step if view else None, **options)
        except KeyboardInterrupt as interrupt:
            partial = getattr(interrupt, "partial_result", None)
            if partial is None:
                if view:
                    view.fail()
                raise Interrupted("nothing was generated yet.") from interrupt
            self._keep(partial, view, output, pair if remember else None)
            raise Interrupted(f"{partial.num_emitted_tokens} tokens so far, kept in {output or LAST}.") from interrupt
        except BaseException as error:
            partial = getattr(error.__cause__ or error, "partial_result", None)
            if partial is not None and partial.num_emitted_tokens:  # one of the user's functions failed, a drafter, ...
                self._keep(partial, None, output, pair if remember else None)
            if view:
                view.fail()
            raise
        self._keep(result, view, output, pair if remember else None)

    def _keep(self, result: Any, view: View | None, output: str | None, pair: Any) -> None:
        self.session.set_result(result)
        if pair is not None:
            self.session.remember(pair, result)
        self._assign(result, LAST, output)
        if view:
            view.finish(result)

    def _assign(self, value: Any, *names: str | None) -> None:
        """Give a result to the user's variables."""
        self.shell.user_ns.update({name: value for name in names if name})


_PARSERS = {
    "specgen": specgen_parser,
    "specload": specload_parser,
    "specpanel": specpanel_parser,
    "specbench": specbench_parser,
    "specmemory": specmemory_parser,
    "spectrain": spectrain_parser,
}
for _name, _make in _PARSERS.items():
    getattr(SpecMagics, _name).__doc__ = _make().format_help()
