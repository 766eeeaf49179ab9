"""Pictures and the comparison behind them: pure, stable in text, no pyplot, readable without colour."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from typing import Any

import pytest
import tiny
from checks import configs

import specnb
from specnb import bench
from specnb.trace import GenerationResult, RowResult, Step
from specnb.views import plots

STEPS = (
    Step(3, (), 0, (1,), 0.0, 0.5),
    Step(4, (2, 3, 9, 8), 2, (2, 3, 4), 0.01, 0.02),
    Step(7, (5,), 1, (5, 6), 0.01, 0.02),
)


def result(scale: float = 1.0, steps: tuple[Step, ...] = STEPS) -> GenerationResult:
    timed = tuple(
        Step(s.position, s.drafted, s.accepted, s.emitted, s.draft_seconds * scale, s.verify_seconds * scale)
        for s in steps
    )
    row = RowResult((7, 7, 7), tuple(i for s in steps for i in s.emitted), timed, "length")
    return GenerationResult("draft_model", [row], seconds=scale, target_passes=len(steps))


def run(label: str, speeds: tuple[float, ...], plain: tuple[float, ...], options: Any = None, **more: Any) -> bench.Run:
    given = {
        "draft_acceptance_rate": 0.5,
        "mean_acceptance_length": 2.0,
        "tokens_per_pass": 1.9,
        "target_passes": 9,
        "same_text": True,
        "lossy": False,
        "draft_cost": 0.001,
        "pass_cost": 0.01,
        **more,
    }
    ups = tuple(a / b for a, b in zip(speeds, plain, strict=True))
    return bench.Run(label, options or {"method": label}, speeds, ups, **given)


PLAIN = (100.0, 110.0, 90.0)


def comparison(*rows: bench.Run, repeats: int = 3) -> bench.Comparison:
    return bench.Comparison([run("plain", PLAIN, PLAIN), *rows], 1, repeats, {"max_new_tokens": 5}, {"torch": "2"})


def texts(figure: Any) -> str:
    parts = [t.get_text() for axes in figure.axes for t in axes.texts]
    for axes in figure.axes:
        parts += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        parts += [t.get_text() for t in axes.get_yticklabels()]
        parts += [t.get_text() for t in axes.get_legend().get_texts()] if axes.get_legend() else []
    return " | ".join(parts)


def test_acceptance_by_position() -> None:
    figure = result().plot("acceptance")
    assert [round(bar.get_height()) for bar in figure.axes[0].patches] == [100, 50, 0, 0]
    assert "Acceptance by draft position" in texts(figure) and "accepted (%)" in texts(figure)
    assert figure.alt == "Acceptance by draft position, draft_model: 1: 100%, 2: 50%, 3: 0%, 4: 0%."


def test_step_timeline() -> None:
    figure = result().plot()
    assert (
        "milliseconds" in texts(figure)
        and "Accepted of drafted: 3 of 5" in texts(figure)
        and "drafted tokens" in texts(figure)
    )
    assert "prompt: 500 ms" in texts(figure) and figure.axes[0].get_ylim()[1] < 100  # the prompt flattens nothing
    assert figure.alt.startswith(repr(figure)) and "0.02 s drafting, 0.54 s verifying" in figure.alt


def test_plain_and_empty_results() -> None:
    for steps in ((Step(3, (), 0, (1,), 0.0, 0.1),), ()):
        one = result(steps=steps)
        assert "nothing was drafted" in repr(one.plot("acceptance")) and one.plot("acceptance").png()[:4] == b"\x89PNG"
        assert one.plot("timeline").png()


def test_a_kind_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"unknown plot 'acceptnce'. Did you mean 'acceptance'"):
        result().plot("acceptnce")


def test_long_results_are_drawn_quickly() -> None:
    import time

    many = result(steps=STEPS * 3000)
    start = time.process_time()
    assert len(many.plot().png()) < 200_000
    assert time.process_time() - start < 5


def test_NBT_02_text_forms_hold_no_times() -> None:
    for kind in plots.KINDS:
        slow, quick = result(3.0).plot(kind), result(0.1).plot(kind)
        assert (
            repr(slow) == repr(quick) == str(slow)
            and " at 0x" not in repr(slow)
            and not re.search(r"\d s\b", repr(slow))
        )
    slow, quick = comparison(run("a", PLAIN, PLAIN)), comparison(run("a", (1.0, 2.0, 3.0), PLAIN))
    assert str(slow) == str(quick) and repr(slow.plot()) == repr(quick.plot()) and repr(slow) == repr(quick)


def test_html_is_an_image_with_alt_text() -> None:
    figure = result().plot()
    html = figure._repr_html_()
    assert html.startswith('<img alt="Timeline of 3 steps') and "base64," in html and "max-width:100%" in html
    figure.alt = '"><script>'
    assert "<script" not in figure.html()
    assert figure.png() == figure.png() and b"Software" not in figure.png()
    assert figure.get_figwidth() <= 7.5


@pytest.mark.slow
def test_no_pyplot() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); from test_plots import result; result().plot().png()\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# ---- comparisons
def test_bars() -> None:
    best = run("draft_model, num_assistant_tokens=3", (150.0, 200.0, 170.0), PLAIN, {"method": "draft_model"})
    figure = comparison(best, run("prompt_lookup", (80.0, 90.0, 85.0), PLAIN)).plot()
    assert [bar.get_width() for bar in figure.axes[0].patches] == [100.0, 170.0, 85.0]
    assert "170.0 (1.82x) ★" in texts(figure) and "tokens per second" in texts(figure)
    assert "draft_model\nnum_assistant_tokens=3" in texts(figure)
    assert "1.82 times plain" in figure.alt and "Best for this prompt" in figure.alt


def test_by_option_with_the_cost_model() -> None:
    rows = [
        run(
            f"draft_model, num_assistant_tokens={k}",
            (10.0 * k,) * 3,
            PLAIN,
            {"method": "draft_model", "num_assistant_tokens": k},
        )
        for k in (4, 1, 2)
    ]
    found = comparison(*rows)
    assert found.varied_option == "num_assistant_tokens"
    figure = found.plot()
    assert (
        "cost model" in texts(figure)
        and "plain decoding" in texts(figure)
        and "tokens per target pass" in texts(figure)
    )
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 2, 4]
    assert comparison(run("a", PLAIN, PLAIN)).varied_option is None
    with pytest.raises(ValueError, match="by_option"):
        plots.by_option(comparison(run("a", PLAIN, PLAIN)))


def test_the_cost_model_is_the_papers() -> None:
    """Leviathan et al., theorem 3.8: (1 - a^(k+1)) / ((1 - a)(k c + 1)), where a pass costs 1 whatever its width."""
    from specnb.bench.measured_run import predicted

    steps = [Step(9, (1, 2, 3), 3, (1, 2, 3, 4)), Step(13, (1, 2, 3), 1, (1, 9)), Step(15, (1, 2, 3), 0, (9,))]
    a, k, c = 4 / 6, 3, 0.1  # 4 of the 6 verified tokens were accepted
    assert predicted(steps, c, 1.0, 1.0) == pytest.approx((1 - a ** (k + 1)) / ((1 - a) * (k * c + 1)))
    assert predicted(steps, c, 2.0, 1.0) == pytest.approx((1 - a ** (k + 1)) / ((1 - a) * (k * c + 2)))
    undrafted = [*steps, *[Step(20, (), 0, (1,))] * 3]  # half of the steps draft nothing
    expected = (0.5 + 0.5 * (1 - a ** (k + 1)) / (1 - a)) / (1 + 0.5 * k * c)
    assert predicted(undrafted, c, 1.0, 1.0) == pytest.approx(expected)
    assert predicted([Step(9, (1, 2), 2, (1, 2, 3))], 0.0, 1.0, 1.0) == 3


def test_verdicts() -> None:
    better, unsure = run("a", (150.0, 200.0, 170.0), PLAIN), run("a", (150.0, 109.0, 170.0), PLAIN)
    assert comparison(better).verdict == "Best for this prompt: a, 1.82 times plain decoding."
    assert comparison(unsure).verdict.startswith("No clear winner for this prompt: a, 1.50 times")
    assert comparison(run("a", (50.0,) * 3, PLAIN)).verdict.startswith("Plain decoding is fastest")
    near = comparison(run("a", (90.0, 120.0, 80.0), (100.0, 110.0, 90.0)), run("b", (50.0,) * 3, (100.0, 110.0, 90.0)))
    assert (
        near.verdict
        == "No clear winner for this prompt: plain decoding in the median, but a was faster in some repeat."
    )
    one = bench.Comparison([run("plain", (2.0,), (2.0,)), run("a", (1.0,), (2.0,))], 1, 1)
    assert "Plain decoding is fastest" in one.verdict and "One run each" in one.verdict
    paired = comparison(
        run("a", (640.0, 600.9, 650.0), (400.0, 600.0, 630.0)), run("b", (600.0, 700.0, 610.0), (400.0, 600.0, 630.0))
    )
    assert paired.best.label == "b" and "b, 1.17 times" in paired.verdict  # by the speed-up that the table shows
    lossy = bench.Comparison([run("plain", (1.0,), (1.0,)), run("a", (2.0,), (1.0,), lossy=True)], 2, 1)
    assert "lossy" in lossy.verdict and "One run each" in lossy.verdict and "these prompts" in lossy.verdict


def test_labels() -> None:
    runs = ["prompt_lookup", specnb.Method("draft_model", num_assistant_tokens=3), {"method": "plain"}]
    assert list(bench.label_runs(runs)) == ["plain", "prompt_lookup", "draft_model, num_assistant_tokens=3"]
    same = [{"method": "draft_model", "num_assistant_tokens": k, "verification": "block"} for k in (1, 2)]
    assert list(bench.label_runs(same)) == [
        "plain",
        "draft_model, num_assistant_tokens=1",
        "draft_model, num_assistant_tokens=2",
    ]
    drafts = [{"method": "draft_model", "assistant_model": tiny.llama(seed)} for seed in (1, 2)]
    names = [f"draft_model, assistant_model=LlamaForCausalLM{more}" for more in ("", " (2)")]
    assert list(bench.label_runs(drafts)) == ["plain", *names]  # never a model's whole repr


@pytest.fixture(scope="module")
def pair() -> specnb.Pair:
    target, tokenizer = tiny.llama(vocab=330), tiny.byte_tokenizer()
    return specnb.Pair(target, tokenizer, tiny.noisy(target, 0.01), tokenizer, name="tiny")


def test_compare_takes_turns(pair: specnb.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    generate = specnb.generate
    monkeypatch.setattr(
        specnb, "generate", lambda *a, **o: asked.append((o["method"], o["max_new_tokens"])) or generate(*a, **o)
    )
    told: list[tuple[int, int, str]] = []
    found = bench.compare(
        pair,
        "the quick",
        ["prompt_lookup", "draft_model"],
        repeats=2,
        max_new_tokens=12,
        on_run=lambda *a: told.append(a),
        do_sample=False,
    )
    names = [name for name, _ in asked]
    assert names == ["plain", "prompt_lookup", "draft_model"] * 2 + ["prompt_lookup", "draft_model", "plain"]
    assert [tokens for _, tokens in asked] == [8] * 3 + [12] * 6
    assert told[0] == (0, 9, "plain") and told[-1][:2] == (8, 9)
    assert [row.same_text for row in found.rows] == [True] * 3 and found.rows[0].draft_acceptance_rate is None
    assert all(row.tokens_per_second[0] > 0 and row.pass_cost > 0 for row in found.rows)
    assert found.rows[2].draft_cost > 0 and found.results["plain"][0].ids == found.results["draft_model"][0].ids


def test_compare_several_prompts_sampling_and_forms(pair: specnb.Pair) -> None:
    ids = tiny.ids(1, 6, 330)
    found = bench.compare(
        pair, ["the quick", ids], ["prompt_lookup"], repeats=1, warmup=0, max_new_tokens=6, do_sample=True, seed=1
    )
    assert found.prompts == 2 and [row.same_text for row in found.rows] == [None, None]
    data = json.loads(found.to_json())
    assert data["environment"].keys() >= {
        "torch",
        "transformers",
        "specnb",
        "threads",
        "machine",
        "date",
        "model",
        "dtype",
    }
    assert data["options"] == {"max_new_tokens": 6, "do_sample": True, "seed": 1}
    frame = found.to_pandas()
    assert len(frame) == 2 and {"label", "tokens_per_second", "speed_up", "repeat"} <= set(frame.columns)
    html = found._repr_html_()
    assert "★" in html and "same text as plain" in html and "speed-up" in html and "tokens/s" in found.text()
    with pytest.raises(ValueError, match="at least one prompt"):
        bench.compare(pair, [], ["plain"])


def test_compare_with_transformers_own(pair: specnb.Pair) -> None:
    """On the same models, with the same texts; what transformers cannot do is said; nothing is left changed."""
    before = configs(pair.target, pair.assistant)
    runs = [
        {"method": "draft_model", "num_assistant_tokens": 3},
        "prompt_lookup",
        {"method": "early_exit", "assistant_early_exit": 2},
        {"method": "draft_model", "num_assistant_tokens": 2, "verification": "block"},
    ]
    found = bench.compare(
        pair, ["the quick", "a fox"], runs, repeats=2, max_new_tokens=10, transformers=True, do_sample=False
    )
    assert configs(pair.target, pair.assistant) == before
    *rows, block = found.rows
    assert all(len(row.own_ratios) == 2 and row.own_ratio > 0 and not row.own for row in rows)
    assert block.own_ratio is None and "block verification" in block.own
    headers = found.table()[1]
    assert "x transformers' own" in headers and "predicted" in headers
    line = dict(zip(headers, found.table()[0][1], strict=True))
    assert line["predicted"].endswith("x") and line["draft/verify/rest %"].count("/") == 2
    assert min(found.rows[1].parts[:2]) > 0


def test_compare_rows_of_a_batch(pair: specnb.Pair) -> None:
    single = bench.compare(
        pair, ["the quick", "a fox"], ["prompt_lookup"], repeats=1, max_new_tokens=8, do_sample=False
    )
    found = bench.compare(
        pair, [["the quick", "a fox"]], ["prompt_lookup"], repeats=1, max_new_tokens=8, do_sample=False
    )
    texts = [row.ids for row in found.results["prompt_lookup"][0].rows]
    assert texts == [result.ids for result in single.results["prompt_lookup"]]
    assert found.rows[1].same_text and found.prompts == 1


def test_compare_cancelled(pair: specnb.Pair) -> None:
    cancel = threading.Event()
    found = bench.compare(
        pair,
        "the quick",
        ["prompt_lookup"],
        repeats=3,
        max_new_tokens=6,
        cancel=cancel,
        on_run=lambda done, *_: done >= 5 and cancel.set(),
    )
    assert found.repeats == 1 and len(found.rows[0].tokens_per_second) == 1
    cancel.set()
    assert bench.compare(pair, "the quick", ["prompt_lookup"], cancel=cancel).rows == []
