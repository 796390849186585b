"""Log-probs and entropy in chunks beside the path over full logits: same numbers, peak memory, time. Forward and backward.

    python -m benchmarks.logprob_head [--tokens N] [--hidden N] [--chunk N] [--rounds N] [--json FILE]

Vocabulary of 151,936 (Qwen), bfloat16. Every measurement is a process of its own: its memory is what the kernel counted
beyond what was held before the first pass (the weight and the hidden states), its time the fastest of the passes after that.
The other path is the plain one: all logits, in float32 a log-softmax of them, the entropy from that, and autograd.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.table import Row, at_most, plain, text, write_json

VOCABULARY = 151_936
TEMPERATURE = 0.7
CASES = ("log-probs", "log-probs and entropy")  # what has a gradient; the entropy is computed in both
PATHS = ("full logits", "in chunks")


def full_logits(hidden, weight, targets, entropy_gradient: bool, chunk: int):
    import torch

    log_p = torch.log_softmax((hidden @ weight.t()).float() / TEMPERATURE, dim=-1)
    with torch.set_grad_enabled(entropy_gradient):
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


def in_chunks(hidden, weight, targets, entropy_gradient: bool, chunk: int):
    from megarl.megatron.head import token_scores

    scores = token_scores(hidden, weight, targets, vocabulary=VOCABULARY, temperature=TEMPERATURE, chunk=chunk)
    return scores.log_probs, scores.entropy if entropy_gradient else scores.entropy.detach()


def one_pass(path: str, case: str, inputs, chunk: int) -> list:
    """Values and gradients of one forward and backward pass."""
    hidden, weight, targets, up, up_entropy = inputs
    hidden.grad = weight.grad = None
    both = case == CASES[1]
    log_probs, entropy = {"full logits": full_logits, "in chunks": in_chunks}[path](
        hidden, weight, targets, both, chunk
    )
    loss = up @ log_probs
    if both:
        loss = loss + up_entropy @ entropy
    loss.backward()
    return [log_probs.detach(), entropy.detach(), hidden.grad, weight.grad]


def inputs(tokens: int, hidden: int, dtype):
    import torch

    g = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=g).to(dtype).requires_grad_()
    weight = torch.empty(VOCABULARY, hidden, dtype=dtype)
    for rows in weight.split(4096):  # a large temporary would raise the peak before it is looked at
        rows.copy_(torch.randn(rows.shape, generator=g).mul_(2 * hidden**-0.5))
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=g)
    return states, weight.requires_grad_(), targets, *torch.randn(2, tokens, generator=g).div_(tokens)


def resident() -> tuple[int, int]:
    """Bytes of this process in memory: now, and at most since the last reset."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))


def measure(path: str, case: str, tokens: int, hidden: int, chunk: int, passes: int) -> dict[str, float]:
    """In a fresh process."""
    import torch

    given = inputs(tokens, hidden, torch.bfloat16)
    small = [x.detach()[:8].clone() for x in given]  # libraries are set up, and no memory is left behind
    small[0].requires_grad_(), small[1].requires_grad_(), small[2].clamp_(max=7)
    one_pass(path, case, small, chunk)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, _ = resident()
    seconds = []
    for _ in range(passes):
        start = time.perf_counter()
        one_pass(path, case, given, chunk)
        seconds.append(time.perf_counter() - start)
        if len(seconds) == 1:
            _, peak = resident()
    return {"bytes": peak - before, "seconds": min(seconds[1:] or seconds)}


def worst_difference(hidden: int) -> float:
    """Of all values and gradients of both cases, float32, few tokens; relative to the largest element."""
    import torch

    given = inputs(48, hidden, torch.float32)
    worst = 0.0
    for case in CASES:
        full, chunked = (one_pass(path, case, given, 20) for path in PATHS)
        pairs = zip(full, chunked, strict=True)
        worst = max(worst, *(float((a - b).abs().max() / a.abs().max()) for a, b in pairs))
    return worst


def child(arguments: list[str], threads: int) -> dict[str, float]:
    from megarl.cpu import process_env

    command = [sys.executable, "-m", "benchmarks.logprob_head", *arguments]
    env = {**os.environ, **process_env(threads)}  # both paths get the allocator that a training rank has
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(found: dict[tuple[str, str], list[dict[str, float]]], args: argparse.Namespace) -> list[Row]:
    rows = []
    for case in CASES:
        memory, seconds = (
            [median(run[what] for run in found[path, case]) for path in PATHS] for what in ("bytes", "seconds")
        )
        rows.append(at_most(f"{case}: peak memory, in chunks ÷ full logits", memory[1] / memory[0], 1 / 8))
        rows.append(at_most(f"{case}: time, in chunks ÷ full logits", seconds[1] / seconds[0], 1.3))
        for path, size, took in zip(PATHS, memory, seconds, strict=True):
            rows.append(plain(f"{case}, {path}: peak GiB for {args.tokens} tokens", size / 2**30))
            rows.append(plain(f"{case}, {path}: seconds", took))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)  # with 4096 all logits take up to 24 GB
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.measure:
        path, case = args.measure
        print(json.dumps(measure(path, case, args.tokens, args.hidden, args.chunk, args.passes)))
        return 0
    if args.check:
        print(json.dumps({"worst": worst_difference(args.hidden)}))
        return 0
    sizes = [f"--{name}={getattr(args, name)}" for name in ("tokens", "hidden", "chunk", "passes")]
    worst = child(["--check", *sizes], args.threads)["worst"]
    rows = [at_most("values and gradients, largest relative difference (float32)", worst, 1e-5)]
    print(text(rows), flush=True)
    if not rows[0].met:
        print("they are not the same, so nothing more is measured")
        return 1
    found: dict[tuple[str, str], list[dict[str, float]]] = {(p, c): [] for p in PATHS for c in CASES}
    for _ in range(args.rounds):
        for case in CASES:
            for path in PATHS:
                found[path, case].append(child(["--measure", path, case, *sizes], args.threads))
    measured = rows_of(found, args)
    print(text(measured))
    if args.json:
        write_json(args.json, rows + measured)
    return 0 if all(row.met for row in measured) else 1


if __name__ == "__main__":
    raise SystemExit(main())
