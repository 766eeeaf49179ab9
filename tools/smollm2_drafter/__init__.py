"""How the drafter of SmolLM2-135M-Instruct is made: prompts, the target's answers, training."""
