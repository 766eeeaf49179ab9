"""Pieces of source that calls are made of: own processors and criteria, and what may be wrapped around a model.

They are source because a finding is printed as a script that stands alone: what runs is what is printed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A piece of source, the option of generate() that it is for, and the expression that makes a fresh one."""

    option: str
    source: str
    make: str


def _processor(make: str, body: str, state: str = "") -> Part:
    name = make.split("(")[0]
    init = f"    def __init__(self): {state}\n" if state else ""
    return Part(
        "logits_processor", f"class {name}(LogitsProcessor):\n{init}    def __call__(self, ids, scores):\n{body}", make
    )


def _criterion(make: str, body: str, state: str = "") -> Part:
    name = make.split("(")[0]
    init = f"    def __init__(self): {state}\n" if state else ""
    return Part(
        "stopping_criteria",
        f"class {name}(StoppingCriteria):\n{init}    def __call__(self, ids, scores, **more):\n{body}",
        make,
    )


OWN: dict[str, Part] = {
    # ---- processors without a state
    "last token": _processor(
        "NotAgain()", "        scores = scores.clone()\n        return scores.scatter(1, ids[:, -1:], -torch.inf)\n"
    ),
    "parity": _processor(
        "Parity()",
        "        scores = scores.clone()\n        scores[:, ids.shape[1] % 2 :: 2] -= 3\n        return scores\n",
    ),
    "sum": _processor(
        "Sum()",
        "        bias = torch.arange(scores.shape[1]) == ids.sum(1, keepdim=True) % scores.shape[1]\n"
        "        return scores + 9 * bias\n",
    ),
    "in place": _processor("InPlace()", "        scores[:, 3:9] = -torch.inf\n        return scores\n"),
    # ---- with one
    "counting": _processor(
        "Counting()",
        "        self.calls += 1\n        scores = scores.clone()\n"
        "        scores[:, self.calls * 7 % scores.shape[1]] += 20\n        return scores\n",
        "self.calls = 0",
    ),
    "remembers": _processor(
        "Remembers()",
        "        self.seen.append(ids[0, -1].item())\n        scores = scores.clone()\n"
        "        scores[:, self.seen[-3:]] -= 5\n        return scores\n",
        "self.seen = []",
    ),
    # ---- that know rows and the prompt's padded length
    "row bias": _processor(
        "RowBias()",
        "        row = torch.arange(len(scores))[:, None]\n"
        "        return scores + torch.where(torch.arange(scores.shape[1]) % 2 == row % 2, 0.0, -30.0)\n",
    ),
    "row table": _processor(
        "RowTable()",
        "        table = torch.randn(ROWS, scores.shape[1], generator=torch.Generator().manual_seed(3))\n"
        "        return scores + 4 * table.to(scores.dtype)\n",
    ),
    "budget": _processor(
        "Budget()",
        "        if ids.shape[1] - WIDTH == 2:\n            scores = torch.full_like(scores, -torch.inf)\n"
        "            scores[:, 9] = 0\n        return scores\n",
    ),
    "remembers rows": _processor(
        "RemembersRows()",
        "        self.seen = self.seen or [[] for _ in ids]\n        scores = scores.clone()\n"
        "        for row, seen in enumerate(self.seen):\n            seen.append(int(ids[row, -1]))\n"
        "            scores[row, seen[-2:]] -= 8\n        return scores\n",
        "self.seen = []",
    ),
    # ---- stopping criteria
    "token seen": _criterion("TokenSeen()", "        return (ids[:, -1] % 5 == 3)\n"),
    "any row": _criterion("AnyRow()", "        return torch.full((len(ids),), bool((ids[:, WIDTH:] == 7).any()))\n"),
    "counts calls": _criterion(
        "CountsCalls()",
        "        self.calls += 1\n        return torch.full((len(ids),), self.calls >= 4)\n",
        "self.calls = 0",
    ),
    "done per row": _criterion(
        "DonePerRow()",
        "        for row, text in enumerate(ids[:, WIDTH:].tolist()):\n"
        "            self.done[row] = self.done[row] or any(t % 7 == row for t in text)\n"
        "        return torch.full((len(ids),), all(self.done))\n",
        "self.done = [False] * ROWS",
    ),
    "per row tensor": _criterion(
        "PerRowTensor()",
        "        limit = torch.tensor([WIDTH + 3 + row for row in range(ROWS)])\n        return ids.shape[1] >= limit\n",
    ),
    "length": Part("stopping_criteria", "", "MaxLengthCriteria(WIDTH + 5)"),
    "ends": Part("stopping_criteria", "", "EosTokenCriteria([7, 12, 20, 33])"),
    # ---- allowed tokens
    "allowed by row": Part(
        "prefix_allowed_tokens_fn",
        "def allowed(batch_id, ids):\n    return list(range(3 + 20 * batch_id, 20 + 20 * batch_id))\n",
        "allowed",
    ),
    "allowed by length": Part(
        "prefix_allowed_tokens_fn",
        "def allowed(batch_id, ids):\n    return [t for t in range(3, 60) if t % 3 == len(ids) % 3]\n",
        "allowed",
    ),
}

WRAPPERS: dict[str, str] = {
    "none": "",
    "lora": """
    import peft
    m = peft.get_peft_model(m, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
""",
    "lora inside": """
    import peft
    m = peft.get_peft_model(m, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval().base_model.model
""",
    "add_adapter": """
    import peft
    m.add_adapter(peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    m.eval()
""",
    "prompt tuning": """
    import peft
    m = peft.get_peft_model(m, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
""",
    "offload": """
    import accelerate
    m = accelerate.cpu_offload(m, execution_device=torch.device("cpu"))
""",
    "pack": """
    specnb.pack(m)
""",
    "hook": """
    m.get_output_embeddings().register_forward_hook(lambda module, args, out: out.roll(1, -1))
""",
    "hook of layers": """
    for module in m.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, args, out: out * 1.25)
""",
    "pre-hook": """
    m.get_output_embeddings().register_forward_pre_hook(lambda module, args: (args[0] * torch.linspace(0, 2, args[0].shape[-1]).to(args[0].dtype),))
""",
    "own prepare": """
    class Mine(type(m)):
        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            made = super().prepare_inputs_for_generation(input_ids, **kwargs)
            if made.get("position_ids") is not None:
                made["position_ids"] = made["position_ids"] * 2
            return made
    m.__class__ = Mine
""",
    "prepare of the instance": """
    prepare = m.prepare_inputs_for_generation
    def mine(input_ids, **kwargs):
        made = prepare(input_ids, **kwargs)
        if made.get("input_ids") is not None:
            made["input_ids"] = (made["input_ids"] + 1) % 60
        return made
    m.prepare_inputs_for_generation = mine
""",
    "own forward": """
    class Mine(type(m)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits.flip(-1)
            return out
    m.__class__ = Mine
""",
    "dynamic int8": """
    torch.ao.quantization.quantize_dynamic(m, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
""",
    "train mode": """
    m.train()
""",
    "eager": """
    m.set_attn_implementation("eager")
""",
    "compiled config": """
    m.generation_config.update(temperature=0.7, repetition_penalty=1.3, num_assistant_tokens=2)
""",
    "autocast": "",
}
