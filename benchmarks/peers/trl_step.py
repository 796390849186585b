"""TRL's GRPOTrainer on the demo's task; runs in TRL's own environment. Prints one JSON line a step: {"seconds": s, "reward": r}."""

from __future__ import annotations

import json
import re
import sys
import time

import reasoning_gym
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def last_number(completions, answer, **_):
    found = [re.findall(r"-?\d+", c[-1]["content"]) for c in completions]
    return [float(bool(n) and n[-1] == a) for n, a in zip(found, answer, strict=True)]


class Clock(TrainerCallback):
    """From the begin of one step to the begin of the next, generation included."""

    def __init__(self):
        self.last = None

    def on_step_begin(self, args, state, control, **_):
        self.last = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "reward" in logs:
            print(json.dumps({"seconds": time.perf_counter() - self.last, "reward": logs["reward"]}), flush=True)


def main() -> None:
    model, steps = sys.argv[1], int(sys.argv[2])
    problems = reasoning_gym.create_dataset(
        "chain_sum", size=steps * 8 + 64, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": p["question"]}], "answer": p["answer"]} for p in problems]
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=last_number,
        train_dataset=data,
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=sys.argv[3],
            max_steps=steps,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=16,
            temperature=1.0,
            learning_rate=2.5e-5,
            beta=0.0,
            bf16=False,  # the model itself is bfloat16
            model_init_kwargs={"dtype": "bfloat16"},
            use_cpu=True,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
