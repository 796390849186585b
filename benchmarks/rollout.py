"""Tokens a second of the whole rollout, prompts to batch, beside SGLang's bare engine and transformers.generate: the same requests.

    python -m benchmarks.rollout [--rounds N] [--new-tokens N] [--json FILE]

Greedy answers of SmolLM2-135M (or the model that stands in for it) in bfloat16 to 8 prompts, 8 times each: a step of the demo with
longer answers. Both engines run at the same time and are asked in alternation; one that waits sleeps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from benchmarks.table import at_least, plain, text, write_json
from megarl import config, models
from megarl.batch import Prompt
from megarl.cpu import process_env

ROOT = Path(__file__).parents[1]
PROMPTS, COPIES, PROMPT_TOKENS = 8, 8, 48
CACHE = 16384


@contextmanager
def bare(folder: Path, dtype: str) -> Iterator[subprocess.Popen[str]]:
    threads = os.cpu_count() or 1
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.peers.bare_sglang", str(folder), dtype, str(CACHE)],
        cwd=ROOT,
        env={**os.environ, **process_env(threads), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "ready":
            if process.poll() is not None:
                raise SystemExit("SGLang's bare engine did not start")
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def ask_bare(process: subprocess.Popen[str], prompts: list[Prompt], new_tokens: int, stops: list[int]) -> float:
    assert process.stdin is not None and process.stdout is not None
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "stop_token_ids": stops}
    ids = [prompt.token_ids for prompt in prompts for _ in range(COPIES)]
    process.stdin.write(json.dumps({"prompts": ids, "sampling": sampling}) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    return answer["tokens"] / answer["seconds"]


def ask_transformers(folder: Path, dtype: str, prompts: list[Prompt], new_tokens: int, stops: list[int]) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ids = torch.tensor([prompt.token_ids for prompt in prompts for _ in range(COPIES)])
    settings = {"do_sample": False, "eos_token_id": stops, "pad_token_id": 0}
    with torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, **settings)
        begun = time.perf_counter()
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **settings)
        seconds = time.perf_counter() - begun
    ended = torch.isin(made[:, ids.shape[1] :], torch.tensor(stops)).int().cumsum(-1)
    return int((ended == 0).sum() + (ended == 1).any(-1).sum()) / seconds


def measure(rounds: int, new_tokens: int) -> tuple[list[float], list[float], float]:
    from megarl.controller.cluster import cluster
    from megarl.controller.engines import EngineGroup
    from megarl.controller.rollout import Generated

    cfg = config.load(
        ROOT / "configs/demo.yaml",
        [
            f"rollout.n={COPIES}",
            "rollout.temperature=1.0",
            f"rollout.max_new_tokens={new_tokens}",
            f"rollout.max_total_tokens={CACHE}",
            "rollout.top_k=1",  # greedy, at a temperature that training may have
        ],
    )
    folder = models.resolve(cfg.model.path)
    generator = torch.Generator().manual_seed(1)
    whole: list[float] = []
    alone: list[float] = []
    with tempfile.TemporaryDirectory() as scratch, cluster(cfg.cluster, Path(scratch, "logs")):
        engines = EngineGroup(cfg, folder)
        try:
            with bare(folder, cfg.model.dtype) as process:
                engines.ready()
                stops = engines.slots[0].info["stop_token_ids"]
                rollout = Generated(engines, cfg.rollout)
                for number in range(rounds + 1):
                    # other prompts every time: nobody finds them in a cache
                    ids = torch.randint(100, 40000, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
                    prompts = [Prompt(f"{number}-{i}", row) for i, row in enumerate(ids)]
                    begun = time.perf_counter()
                    batch = rollout.collect(prompts, number)
                    ours = int(batch.response_lengths.sum()) / (time.perf_counter() - begun)
                    theirs = ask_bare(process, prompts, new_tokens, stops)
                    if number:  # the first warms up
                        whole.append(ours)
                        alone.append(theirs)
                        print(f"round {number}: megarl {ours:.0f}, SGLang alone {theirs:.0f} tokens/s", flush=True)
        finally:
            engines.shutdown()
    return whole, alone, ask_transformers(folder, cfg.model.dtype, prompts, new_tokens, stops)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    whole, alone, transformers = measure(args.rounds, args.new_tokens)
    ratios = [ours / theirs for ours, theirs in zip(whole, alone, strict=True)]
    rows = [
        at_least("rollout: tokens/s, megarl ÷ SGLang's bare engine", median(ratios), 0.95),
        at_least("rollout: tokens/s, megarl ÷ transformers.generate", median(whole) / transformers, 1.0),
        plain("rollout: megarl, tokens/s", median(whole)),
        plain("rollout: SGLang's bare engine, tokens/s", median(alone)),
        plain("rollout: transformers.generate, tokens/s", transformers),
    ]
    print(text(rows))
    if args.json:
        write_json(args.json, rows)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
