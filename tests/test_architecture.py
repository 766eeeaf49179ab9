"""Who may import whom, how long a module may be, and what `import specnb` may cost."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import specnb

ROOT = Path(specnb.__file__).parent
MODULES = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}
CEILING = 320

# package or module -> what of specnb its modules may import when they are loaded, beside their own package
MAY_IMPORT: dict[str, set[str]] = {
    "options": set(),
    "steps": set(),
    "trace": {"steps"},
    "text": set(),
    "compat": set(),
    "runtime": {"compat"},
    "views": {"options", "trace"},
    "models": {"compat", "options", "runtime", "text"},
    "memory": {"models", "text"},
    "decoding": {"compat", "runtime", "trace"},
    "drafters": {"compat", "decoding", "memory", "models", "options", "runtime", "text"},
    "call": {"compat", "decoding", "drafters", "memory", "models", "options", "text", "trace"},
    "training": {"models", "options", "runtime", "text"},
    "bench": {"compat", "models", "options", "runtime", "text", "trace"},
    "notebook": {"call", "memory", "models", "options", "text", "trace", "views"},
    "demo": {"models", "options", "text", "trace", "views"},
    "cli": {"demo", "options"},
    "__main__": {"cli"},
    "__init__": set(),
}
# names of torch, transformers and accelerate that only compat may know
PRIVATE = (
    "_attn_implementation",
    "_update_model_kwargs_for_generation",
    "_prepare_position_ids_for_generation",
    "_get_default_generation_params",
    "_pad_token_tensor",
    "_is_user_defined",
    "_is_stateful",
    "_keys_to_ignore_on_load_unexpected",
    "_project_to_logits",
    "_hf_hook",
    "_orig_mod",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_version",
    "_reorder_linear_weight",
    "_linear_pointwise",
)


def imports(path: Path, everywhere: bool = False) -> Iterator[str]:
    """Modules that a file imports: when it is loaded (type checking aside), or anywhere in it."""

    def of(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from of(child)
        elif everywhere or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for child in ast.iter_child_nodes(node):
                yield from of(child)

    yield from of(ast.parse(path.read_text(encoding="utf-8")))


def own(names: Iterator[str]) -> set[str]:
    """The parts of specnb among imported names: specnb.decoding.loop.decode -> decoding."""
    return {parts[1] for parts in (name.split(".") for name in names) if parts[0] == "specnb" and len(parts) > 1}


def part(module: str) -> str:
    return module.split(".")[1] if "." in module and module != "specnb.__init__" else "__init__"


@pytest.mark.parametrize("module", MODULES)
def test_layers(module: str) -> None:
    layer = part(module)
    assert own(imports(MODULES[module])) - {layer} <= MAY_IMPORT[layer]


def test_the_layers_have_no_circle() -> None:
    below: set[str] = set()
    while below != MAY_IMPORT.keys():
        ready = {layer for layer, others in MAY_IMPORT.items() if layer not in below and others <= below}
        assert ready, MAY_IMPORT.keys() - below
        below |= ready


@pytest.mark.parametrize("module", MODULES)
def test_only_compat_knows_private_names(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    if part(module) != "compat":
        assert not names & set(PRIVATE)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_the_notebook(module: str) -> None:
    if part(module) not in ("notebook", "__init__"):
        assert "notebook" not in own(imports(MODULES[module], everywhere=True))
    if part(module) == "__init__":
        assert not own(imports(MODULES[module]))


@pytest.mark.parametrize("module", MODULES)
def test_third_parties_stay_where_they_belong(module: str) -> None:
    tops = {name.split(".")[0] for name in imports(MODULES[module], everywhere=True)}
    if part(module) != "notebook":
        assert not tops & {"IPython", "anywidget", "ipywidgets", "traitlets", "ipykernel"}
    if module != "specnb.views.plots":
        assert "matplotlib" not in tops
    loaded = {name.split(".")[0] for name in imports(MODULES[module])}
    if part(module) in ("options", "steps", "trace", "text", "views", "__init__"):
        assert not loaded & {"torch", "transformers"}
    assert "pandas" not in loaded


def test_the_reader_of_imports_sees_them() -> None:
    found = own(imports(MODULES["specnb.drafters.prompt_lookup"]))
    assert "decoding" in found
    assert "notebook" in own(imports(ROOT / "__init__.py", everywhere=True))
    assert {"torch", "transformers"} <= {name.split(".")[0] for name in imports(MODULES["specnb.call.custom_generate"])}


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short(module: str) -> None:
    assert len(MODULES[module].read_text(encoding="utf-8").splitlines()) <= CEILING


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


HEAVY = ("torch", "transformers", "anywidget", "ipywidgets", "IPython", "matplotlib", "pandas", "numpy")


@pytest.mark.parametrize(
    "statement", ["import specnb", "import specnb; dir(specnb); specnb.Method('plain'); specnb.GenerationResult"]
)
def test_import_is_light(statement: str) -> None:
    out = fresh(f"import sys; {statement}; print([name for name in {HEAVY!r} if name in sys.modules])")
    assert out.strip() == "[]"


def test_import_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import specnb; print(time.perf_counter() - t)"
    assert min(float(fresh(code)) for _ in range(5)) < 0.3


@pytest.mark.parametrize("name", [name for name in specnb.__all__ if inspect.isfunction(getattr(specnb, name))])
def test_public_functions_explain_their_arguments(name: str) -> None:
    """Each argument has a line under "Args"; `decoder` points to `generate` for those that they share."""
    function = getattr(specnb, name)
    doc = inspect.getdoc(function) + ((inspect.getdoc(specnb.generate) or "") if name == "decoder" else "")
    arguments = doc[doc.index("Args:") :]
    for argument in inspect.signature(function).parameters:
        assert re.search(rf"^ +(\w+, )*{argument}(, \w+)*: ", arguments, re.M), argument


def test_public_names() -> None:
    for name in specnb.__all__:
        assert getattr(specnb, name).__name__ == name
        assert getattr(specnb, name).__doc__
    assert set(specnb.__all__) <= set(dir(specnb))
    assert specnb.bench.compare.__doc__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = specnb.nonsense
