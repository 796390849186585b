"""One training step beside transformers with AdamW, beside its bare matmuls, and on two ranks instead of one.

    python -m benchmarks.train_step [--quick] [--only REGEX] [--rounds N] [--tokens N] [--json FILE]

SmolLM2-135M, 4096 tokens of sequences whose lengths have a long tail, each with a prompt of its own (nothing is shared): forward,
clipped policy loss, backward, gradient norm and clipping, Adam. Contenders are processes that stay and are asked in turn, all
with the allocator and the threads that a trainer's rank has; a ratio is the median over rounds of the ratios within a round. Before
anything is timed, their losses and gradient norms must agree.

The limit is the time of the linear layers' products alone, output layer included (of the response tokens): forward, and for
inputs and weights backward, without attention and without anything that stands between products.

Two ranks of one thread each are compared with one of two threads. SmolLM2's 9 heads cannot be shared by two, so there a random
model has 6 heads of 96 with 2 of keys and values: products of the very same shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.table import Row, at_least, plain, text, write_json
from megarl import models
from megarl.cpu import process_env

DTYPES = ("bfloat16", "float32")
# Largest difference of the loss (whose terms are about 1) and relative difference of the gradient's norm.
TOLERANCE = {"float32": (2e-5, 1e-3), "bfloat16": (1e-2, 1e-1)}
WAYS = ("padded", "alone", "packed")
LAYOUTS = {"DP2": {}, "TP2": {"tensor": 2}, "PP2": {"pipeline": 2}}
PIPELINE_TOKENS = 512  # of a micro-batch: a pipeline wants several
LR, CLIP = 1e-9, 1.0  # steps so small that every one sees the same weights


def samples(tokens: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) ids, `tokens` in all: responses log-normal around 90 tokens, a few of them many times as long."""
    import torch

    g = torch.Generator().manual_seed(4)
    found: list[tuple[list[int], list[int]]] = []
    left = tokens
    while left:
        p = int(torch.randint(32, 96, (1,), generator=g))
        r = max(8, min(1024, int(torch.randn(1, generator=g).mul(1.2).add(4.5).exp())))
        if left - p - r < 64:
            p, r = min(64, left // 2), left - min(64, left // 2)
        found.append(tuple(torch.randint(5, 49000, (n,), generator=g).tolist() for n in (p, r)))
        left -= p + r
    return found


# What runs in a contender's process: `command -> answer` functions.


def ours(args: argparse.Namespace) -> Callable[[str], dict[str, Any]]:
    """The engine of one rank of a layout."""
    from megarl.cpu import enter_megatron

    enter_megatron()
    import torch

    from megarl.algorithms import Objective, denominators
    from megarl.batch import Batch, Level, Sample
    from megarl.batch.packing import shares
    from megarl.config.schema import OptimizerConfig
    from megarl.megatron import parallel
    from megarl.megatron.engine import EngineSettings, MegatronEngine

    layout = {"tensor": 1, "pipeline": 1} | LAYOUTS.get(args.layout, {})
    place = parallel.start(args.rank, args.world, "127.0.0.1", args.port, **layout, seed=1)
    budget = PIPELINE_TOKENS if place.pipeline_size > 1 else args.micro_batch_tokens
    engine = MegatronEngine(
        args.folder,
        place,
        EngineSettings(args.dtype, micro_batch_tokens=budget, share_prompts=False),
        optimizer=OptimizerConfig(lr=LR, clip_grad=CLIP),
        total_updates=10**6,
    )
    rows = [
        Sample(str(i), str(i), p, r, [1] * len(r), [0.0] * len(r), "stop", 0, 0.0, {})
        for i, (p, r) in enumerate(samples(args.tokens))
    ]
    whole = Batch.from_samples(rows)
    totals = denominators(whole.padded("loss_mask"))
    data: dict[str, Batch] = {}

    def answer(command: str) -> dict[str, Any]:
        if command.startswith("make "):  # what the policy was, a little beside what it is
            done = engine.log_probs(whole, temperature=1.0)
            assert done is not None
            old = done["log_probs"] + 0.1 * torch.randn(
                len(done["log_probs"]), generator=torch.Generator().manual_seed(4)
            )
            torch.save(old, command.removeprefix("make "))
            return {}
        if command.startswith("take "):
            old, advantages = given(command.removeprefix("take "))
            batch = whole.set("old_log_probs", old, Level.RESPONSE).set("advantages", advantages, Level.RESPONSE)
            parts = shares(batch, place.data_size, pair_cost=1 / (6 * 576), share_prompts=False)
            data["own"] = batch.take(torch.tensor(parts[place.data]))
            return {}
        begin = time.perf_counter()
        found = engine.train(data["own"], Objective(clip_dual=None), totals)
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "loss": found.get("sum/loss", 0.0),
            "norm": found["grad_norm"],
            "place": place.tensor,
        }

    return answer


def given(path: str):
    """(R,) log-probs of the policy as it was, (R,) advantages."""
    import torch

    old = torch.load(path)
    return old, torch.randn(len(old), generator=torch.Generator().manual_seed(5))


def theirs(args: argparse.Namespace) -> Callable[[str], dict[str, Any]]:
    from benchmarks.peers.transformers_step import Peer

    peer = Peer(args.folder, args.dtype, samples(args.tokens), LR, CLIP)
    data: list[Any] = []

    def answer(command: str) -> dict[str, Any]:
        if command.startswith("take "):
            data[:] = given(command.removeprefix("take "))
            return {}
        begin = time.perf_counter()
        loss, norm = peer.step(command, *data)
        return {"seconds": time.perf_counter() - begin, "loss": loss, "norm": norm}

    return answer


def matmuls(args: argparse.Namespace) -> Callable[[str], dict[str, Any]]:
    """Every product of the linear layers of a step, into memory that is there already."""
    import torch

    from megarl.bridge.model_map import ModelMap

    rows = samples(args.tokens)
    tokens, responses = sum(len(p) + len(r) for p, r in rows), sum(len(r) for _, r in rows)
    shapes = ModelMap.from_hf(args.folder).hf_shapes
    names = [name for name in shapes if len(shapes[name]) == 2 and "embed" not in name and "lm_head" not in name]
    head = shapes["model.embed_tokens.weight"]
    # Megatron's linear layers: q, k and v are one product, and so are gate and up.
    layers: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name in names:
        kind = re.sub(r"(q|k|v)_proj", "qkv", re.sub(r"(gate|up)_proj", "gate_up", name))
        layers[kind].append(tuple(shapes[name]))
    work = [(tokens, sum(out for out, _ in found), found[0][1]) for found in layers.values()] + [(responses, *head)]
    dtype = getattr(torch, args.dtype)
    made: dict[tuple[int, int, int], tuple] = {}
    for n, out, into in set(work):
        operands = [torch.randn(shape).to(dtype) for shape in ((n, into), (out, into), (n, out))]
        made[n, out, into] = (*operands, *(torch.empty_like(o) for o in operands))

    def answer(command: str) -> dict[str, Any]:
        begin = time.perf_counter()
        for shape in work:
            x, w, g, dx, dw, y = made[shape]
            torch.mm(x, w.t(), out=y)
            torch.mm(g, w, out=dx)
            torch.mm(g.t(), x, out=dw)
        return {"seconds": time.perf_counter() - begin, "tera": sum(6e-12 * a * b * c for a, b, c in work)}

    return answer


CONTENDERS = {"ours": ours, "theirs": theirs, "matmuls": matmuls}


def serve(args: argparse.Namespace) -> None:
    answer = CONTENDERS[args.serve](args)
    for line in sys.stdin:
        print("answer " + json.dumps(answer(line.strip())), flush=True)


# The driver.


class Contender:
    """One or more ranks that do a step together."""

    def __init__(self, kind: str, folder: Path, dtype: str, args: argparse.Namespace, layout: str = ""):
        from megarl.roles.ports import unused_port

        world, port = (2 if layout in LAYOUTS else 1), unused_port()
        threads = max(1, args.threads // world)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.train_step", "--serve", kind, "--layout", layout]
        command += ["--folder", str(folder), "--dtype", dtype, "--port", str(port), "--world", str(world)]
        command += [f"--tokens={args.tokens}", f"--micro-batch-tokens={args.micro_batch_tokens}"]
        self.ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                cwd=Path(__file__).parents[1],
                env={**os.environ, **process_env(threads), "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]

    def ask(self, command: str) -> dict[str, Any]:
        """Of the slowest rank the seconds, of all ranks the loss."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(command + "\n")
            rank.stdin.flush()
        answers = [self._answer(rank) for rank in self.ranks]
        whole = dict(answers[0])
        for key, join in (("seconds", max), ("loss", sum)):
            if key in whole:
                whole[key] = join(a[key] for a in answers if not (key == "loss" and a.get("place")))
        return whole

    def _answer(self, rank: subprocess.Popen[str]) -> dict[str, Any]:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise SystemExit(f"a contender ended: {' '.join(map(str, rank.args))}")

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


@contextmanager
def contenders(**wanted: Callable[[], Contender]) -> Iterator[dict[str, Contender]]:
    with ExitStack() as stack:
        found = {}
        for name, make in wanted.items():
            found[name] = make()
            stack.callback(found[name].end)
        yield found


Asked = Callable[[], dict[str, Any]]


def same(asked: dict[str, Asked], first: str, tolerance: tuple[float, float]) -> dict[str, dict[str, Any]]:
    """The first step of each, which must give one loss and one gradient norm; SystemExit where it does not."""
    found = {name: ask() for name, ask in asked.items()}
    base = found[first]
    for name, other in found.items():
        if "loss" not in other:
            continue
        apart = abs(other["loss"] - base["loss"]), abs(other["norm"] / base["norm"] - 1)
        print(
            f"  {name}: loss {other['loss']:.6f}, gradient norm {other['norm']:.5f}, {other['seconds']:.2f} s",
            flush=True,
        )
        if not all(a <= t for a, t in zip(apart, tolerance, strict=True)):
            raise SystemExit(f"{name} and {first} computed different things: {apart}")
    return found


def rounds(asked: dict[str, Asked], count: int) -> dict[str, list[float]]:
    """Seconds of each, by round; every round in another order."""
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    names = list(asked)
    for number in range(count):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(asked[name]()["seconds"])
        print(f"  round {number + 1}: " + ", ".join(f"{n} {s[-1]:.2f}" for n, s in seconds.items()), flush=True)
    return seconds


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return median(a / b for a, b in zip(over, under, strict=True))


def beside_peers(dtype: str, args: argparse.Namespace, scratch: Path) -> list[Row]:
    folder = models.resolve("smollm2")
    kinds = {kind: (lambda kind=kind: Contender(kind, folder, dtype, args)) for kind in CONTENDERS}
    with contenders(**kinds) as at:
        old = scratch / f"{dtype}.pt"
        at["ours"].ask(f"make {old}")
        for name in ("ours", "theirs"):
            at[name].ask(f"take {old}")
        print(f"{dtype}: the same step", flush=True)
        asked: dict[str, Asked] = {"megarl": lambda: at["ours"].ask("step")}
        asked |= {f"transformers {way}": (lambda way=way: at["theirs"].ask(way)) for way in WAYS}
        asked["matmuls"] = lambda: at["matmuls"].ask("step")
        first = same(asked, "megarl", TOLERANCE[dtype])
        seconds = rounds(asked, args.rounds)
    mine = seconds["megarl"]
    unpadded = min((seconds[f"transformers {way}"] for way in WAYS[1:]), key=median)
    rows = [
        at_least(f"{dtype}: transformers padded ÷ megarl", ratio(seconds["transformers padded"], mine), 1.5),
        at_least(f"{dtype}: transformers unpadded (the faster) ÷ megarl", ratio(unpadded, mine), 1.1),
        at_least(f"{dtype}: bare matmuls ÷ megarl", ratio(seconds["matmuls"], mine), 0.5),
    ]
    rows += [plain(f"{dtype}, {name}: seconds", median(values)) for name, values in seconds.items()]
    tera = first["matmuls"]["tera"]
    return [*rows, plain(f"{dtype}: TFLOP/s of the bare matmuls", tera / median(seconds["matmuls"]))]


def two_ranks(dtype: str, args: argparse.Namespace, scratch: Path) -> list[Row]:
    """Each layout in alternation with one rank; one after the other, for memory."""
    folder, old = six_heads(scratch / "six_heads"), scratch / f"{dtype}-layouts.pt"
    rows = []
    for layout in LAYOUTS:
        places = {
            name: (lambda name=name: Contender("ours", folder, dtype, args, name)) for name in ("one rank", layout)
        }
        with contenders(**places) as at:
            at["one rank"].ask(f"make {old}")
            for contender in at.values():
                contender.ask(f"take {old}")
            print(f"{dtype}: the same step, {layout}", flush=True)
            asked: dict[str, Asked] = {name: (lambda name=name: at[name].ask("step")) for name in at}
            same(asked, "one rank", TOLERANCE[dtype])
            seconds = rounds(asked, args.rounds)
        one = seconds["one rank"]
        rows.append(plain(f"{dtype}, {layout}: time ÷ one rank of two threads", ratio(seconds[layout], one)))
        rows.append(plain(f"{dtype}, one rank of 6 heads, beside {layout}: seconds", median(one)))
    return rows


def six_heads(folder: Path) -> Path:
    """A random model of SmolLM2's shapes, but 6 heads of 96, which two ranks can share."""
    import torch

    from megarl.bridge.hf_config import read_config
    from megarl.bridge.hf_io import HFWriter
    from megarl.bridge.model_map import ModelMap

    if not folder.exists():
        folder.mkdir()
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 96}
        config = read_config(models.resolve("smollm2")) | heads
        (folder / "config.json").write_text(json.dumps(config))
        shapes = ModelMap.from_hf(config).hf_shapes
        g = torch.Generator().manual_seed(6)
        with HFWriter(folder, shapes, torch.bfloat16, 2**40) as writer:
            for name, shape in shapes.items():
                made = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=g).mul_(0.02)
                writer.write(name, made.bfloat16())
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="512 tokens and one round: that it runs, not how fast it is"
    )
    parser.add_argument("--only", default="", help="a regular expression on: DTYPE peers, DTYPE layouts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)  # as configs/base/laptop.yaml
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    for name, kind in (("serve", str), ("layout", str), ("folder", Path), ("dtype", str), ("port", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    for name, default in (("rank", 0), ("world", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return 0
    if args.quick:
        args.tokens, args.rounds = 512, 1
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for part, run in (("peers", beside_peers), ("layouts", two_ranks)):
            for dtype in DTYPES:
                if re.search(args.only, f"{dtype} {part}"):
                    rows += run(dtype, args, Path(scratch))
    print(text(rows))
    if args.json:
        write_json(args.json, rows)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
