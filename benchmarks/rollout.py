"""Tokens a second of the whole rollout, prompts to batch, beside SGLang's bare engine, SGLang without what megarl adds to it on CPUs
(attention and sampling of a whole batch), and transformers.generate: the same requests.

    python -m benchmarks.rollout [--rounds N] [--new-tokens N] [--json FILE]

Greedy answers of SmolLM2-135M (or the model that stands in for it) in bfloat16 to 8 prompts, 8 times each: a step of the demo with
longer answers. All run at the same time and are asked in alternation; those that wait sleep. transformers has torch's own settings for
threads and memory, the others those of megarl.
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


# name -> module, environment beside that of megarl's processes (None: the caller's, unchanged)
PEERS: dict[str, tuple[str, dict[str, str] | None]] = {
    "SGLang's bare engine": ("benchmarks.peers.bare_sglang", {}),
    "SGLang without megarl's plugins": ("benchmarks.peers.bare_sglang", {"SGLANG_PLUGINS": "none"}),
    "transformers.generate": ("benchmarks.peers.transformers_generate", None),
}


class Peer:
    """A process of its own that is asked by lines."""

    def __init__(self, name: str, folder: Path, dtype: str):
        module, extra = PEERS[name]
        own = {} if extra is None else {**process_env(os.cpu_count() or 1), **extra}
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder), dtype, str(CACHE)],
            cwd=ROOT,
            env={**os.environ, **own, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ready(self) -> None:
        assert self.process.stdout is not None
        while self.process.stdout.readline().strip() != "ready":
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} did not start")

    def tokens_per_second(self, prompts: list[Prompt], new_tokens: int, stops: list[int]) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "stop_token_ids": stops}
        ids = [prompt.token_ids for prompt in prompts for _ in range(COPIES)]
        self.process.stdin.write(json.dumps({"prompts": ids, "sampling": sampling}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["tokens"] / answer["seconds"]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def peers(folder: Path, dtype: str) -> Iterator[list[Peer]]:
    started = [Peer(name, folder, dtype) for name in PEERS]
    try:
        for peer in started:
            peer.ready()
        yield started
    finally:
        for peer in started:
            peer.end()


def measure(rounds: int, new_tokens: int) -> tuple[list[float], dict[str, list[float]]]:
    """Tokens a second of each round: megarl's, and each peer's."""
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
    others: dict[str, list[float]] = {name: [] for name in PEERS}
    with tempfile.TemporaryDirectory() as scratch, cluster(cfg.cluster, Path(scratch, "logs")):
        engines = EngineGroup(cfg, folder)
        try:
            with peers(folder, cfg.model.dtype) as asked:
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
                    theirs = {peer.name: peer.tokens_per_second(prompts, new_tokens, stops) for peer in asked}
                    if number:  # the first warms up
                        whole.append(ours)
                        for name, value in theirs.items():
                            others[name].append(value)
                        beside = ", ".join(f"{name} {value:.0f}" for name, value in theirs.items())
                        print(f"round {number}: megarl {ours:.0f}, {beside} tokens/s", flush=True)
        finally:
            engines.shutdown()
    return whole, others


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    whole, others = measure(args.rounds, args.new_tokens)

    def times(name: str) -> float:
        return median(ours / theirs for ours, theirs in zip(whole, others[name], strict=True))

    rows = [
        at_least(f"rollout: tokens/s, megarl ÷ {name}", times(name), goal)
        for name, goal in zip(PEERS, (0.95, 3.0, 1.5), strict=True)
    ]
    rows.append(plain("rollout: megarl, tokens/s", median(whole)))
    rows += [plain(f"rollout: {name}, tokens/s", median(values)) for name, values in others.items()]
    print(text(rows))
    if args.json:
        write_json(args.json, rows)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
