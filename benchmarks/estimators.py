"""Advantages and policy losses beside verl's core_algos, torchrl's GAE and the memory floor, in one process, in alternation.

    python -m benchmarks.estimators [--quick] [--busy] [--no-peers] [--only REGEX] [--json FILE]

The peers are installed once, without their dependencies, into a folder of the cache, which is added to the path of the process
that measures: the same interpreter, torch, allocator and threads for all. Each result is compared with the peer's before
anything is timed. A round runs all contenders of a case, every round in another order; a ratio is the median over rounds of
the ratio within a round. Memory is the growth of the resident set of a process forked for one call.

The floor: one masked sum over the rewards and one broadcast write, in the fastest of the ways to write it.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.peers.verl_torchrl import (
    PACKAGES,
    VERL_CLIP_DUAL,
    import_peers,
    torchrl_gae,
    verl_advantage,
    verl_policy_loss,
)
from benchmarks.table import Row, at_least, at_most, plain, text, write_json
from megarl.cpu import process_env
from megarl.errors import UserError
from megarl.models.cache import cache_dir, locked

ROOT = Path(__file__).parents[1]
GROUP = 8
TOLERANCE = 1e-4
SECONDS, LEAST_ROUNDS, MOST_ROUNDS = 2.0, 3, 15  # of measuring one case
FLOOR, MEMORY = 1.3, 1.0  # at most
PLAIN, VECTORISED, BESIDE, GAE, TORCHRL, LOSS = 8.0, 1.0, 1.0, 10.0, 2.0, 1.2  # at least

TORCHRLS = "torchrl's fastest"
BARE = "verl beside our loss without metrics"
Run = Callable[[], Any]
Data = dict[str, Any]


class Size(NamedTuple):
    """(sequences, tokens) of each kind of case. The long tail: one sequence has all tokens, the others `short`."""

    group: tuple[int, int]
    gae: tuple[int, int]
    loss: tuple[int, int]
    tail: tuple[int, int]
    short: int


FULL = Size((8192, 1024), (512, 8192), (1024, 1024), (1024, 32768), 500)
QUICK = Size((64, 32), (8, 64), (16, 32), (16, 256), 8)


class Case(NamedTuple):
    """One thing to compute, by us and by others.

    peers: who -> every way it has; the fastest counts. Under "floor" the memory floor.
    goals: who -> how many times our time it should take at least; for the floor, our time in floors at most. Who is not in
    it is shown beside us without a goal.
    place: of a result, what must agree with the peer's.
    differs: peers that define something else, so that values are not compared.
    matching: who -> what we run beside this peer, where that is not `ours`.
    """

    name: str
    ours: Run
    peers: Mapping[str, Mapping[str, Run]]
    goals: Mapping[str, float]
    place: Callable[[Any], Any]
    differs: tuple[str, ...] = ()
    matching: Mapping[str, Run] = MappingProxyType({})


# --- inputs ---------------------------------------------------------------------------------------------------------------------


def inputs(shape: tuple[int, int], short: int | None = None) -> Data:
    """For every estimator, by the names that megarl's functions take. Lengths: half the width to all of it; with `short`, that
    for all sequences but one. Rewards are quarters at the last token: their sums are exact in float32, so that no peer has
    rounding noise to amplify in a group of equal rewards."""
    import torch

    sequences, tokens = shape
    draw = torch.Generator().manual_seed(0)
    lengths_B = torch.randint(tokens // 2, tokens + 1, (sequences,), generator=draw)
    if short is not None:
        lengths_B.fill_(short)
    lengths_B[sequences // 2] = tokens
    parts_BK = torch.randint(0, 3, (sequences, 2), generator=draw) / 4
    reward_BT = torch.zeros(shape)
    reward_BT[torch.arange(sequences), lengths_B - 1] = parts_BK.sum(1)
    order = torch.randperm(sequences, generator=draw).tolist()
    return {
        "reward_BT": reward_BT,
        "mask_BT": torch.arange(tokens) < lengths_B[:, None],
        "group_B": [f"prompt-{number // GROUP:06d}" for number in order],
        "baseline_B": torch.randint(0, 5, (sequences,), generator=draw) / 4,
        "reward_parts_BK": parts_BK,
        "gamma": 0.99,
        "lam": 0.95,
    }


def with_log_probs(data: Data) -> Data:
    """And what a loss takes: log-probs of an old and a slightly newer policy, the newer with gradient; sums of squared
    probabilities that could be."""
    import torch

    shape = data["mask_BT"].shape
    draw = torch.Generator().manual_seed(1)
    old_log_probs_BT = -torch.empty(shape).exponential_(1.0, generator=draw).clamp_(min=1e-3)
    log_probs_BT = (old_log_probs_BT + 0.1 * torch.randn(shape, generator=draw)).clamp_(max=-1e-3)
    p_BT = old_log_probs_BT.exp()
    advantages_BT = torch.randn(len(old_log_probs_BT), 1, generator=draw).expand(shape).contiguous()
    return {
        **data,
        "old_log_probs_BT": old_log_probs_BT,
        "log_probs_BT": log_probs_BT.requires_grad_(),
        "sum_p2_BT": p_BT.square() + (1 - p_BT).square() * torch.rand(shape, generator=draw),
        "advantages_BT": advantages_BT,
    }


def floors(data: Data) -> dict[str, Run]:
    import torch

    reward_BT, mask_BT = data["reward_BT"], data["mask_BT"]
    float_BT, zero = mask_BT.float(), torch.zeros(())

    def product() -> torch.Tensor:
        return (reward_BT * float_BT).sum(-1)[:, None] * float_BT

    def where() -> torch.Tensor:
        return torch.where(mask_BT, torch.where(mask_BT, reward_BT, zero).sum(-1)[:, None], zero)

    return {"product": product, "where": where}


# --- cases ----------------------------------------------------------------------------------------------------------------------

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "gpg", "reinforce_plus_plus_baseline", "gdpo")
# Where an estimator goes by another name, or its defaults are not the peer's: name and options, of ours and of verl's.
OURS: dict[str, tuple[str, Data]] = {
    "dr_grpo": ("grpo", {"normalize_std": False}),
    "gdpo": ("gdpo", {"whiten": "token"}),
    "optimal_token_baseline": ("optimal_token_baseline", {"singleton": "score"}),
}
VERLS: dict[str, tuple[str, Data]] = {"dr_grpo": ("grpo", {"norm_adv_by_std_in_grpo": False})}
VECTORISED_IN_VERL = ("grpo", "rloo")
# Every loss that both have: aggregation, options of ours, options of verl's.
LOSSES: dict[str, tuple[str, Data, Data]] = {
    "vanilla": ("token_mean", {}, {}),
    "gspo": ("seq_mean_token_mean", {}, {}),
    "geo_mean": ("seq_mean_token_mean", {}, {}),
    "sapo": ("seq_mean_token_mean", {}, {}),
    "cispo": ("token_mean", {}, {}),
    "dppo_tv": ("token_mean", {"truncate": VERL_CLIP_DUAL}, {}),
    "dppo_kl": ("token_mean", {"truncate": VERL_CLIP_DUAL}, {}),
    "clip_cov": ("token_mean", {}, {}),
    "kl_cov": ("token_mean", {}, {"ppo_kl_coef": 1.0}),
    "dro": ("token_mean", {"beta": 0.05}, {"dro_beta": 0.05}),
    "gpg": ("token_mean", {}, {}),
    "reinforce": ("seq_mean_token_sum", {}, {}),
}
# verl computes no metric with these: beside it runs our loss alone as well, to show what ours cost.
BARE_IN_VERL = ("gpg", "reinforce")
# Tokens are selected by the old policy and a hash here, by the new one and a random number generator there.
SELECTED_OTHERWISE = ("clip_cov", "kl_cov")


def cases(size: Size) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Every case by name, to be built when its turn comes: the inputs of one are hundreds of megabytes."""
    for name in GROUP_ESTIMATORS:
        yield name, lambda name=name: group_case(name, inputs(size.group))
    yield "grpo, groups named by numbers", lambda: group_case("grpo", numbered(inputs(size.group)))
    for name in ("reinforce_plus_plus", "remax"):
        yield name, lambda name=name: advantage_case(name, inputs(size.group), BESIDE)
    yield (
        "optimal_token_baseline",
        lambda: advantage_case("optimal_token_baseline", with_log_probs(inputs(size.group)), BESIDE),
    )
    yield "gae", lambda: gae_case(inputs(size.gae))
    for name in LOSSES:
        yield f"loss {name}", lambda name=name: loss_case(name, with_log_probs(inputs(size.loss)))
    long_tail = partial(inputs, size.tail, size.short)
    yield "long tail, grpo", lambda: group_case("grpo", long_tail())
    yield "long tail, reinforce_plus_plus", lambda: advantage_case("reinforce_plus_plus", long_tail(), BESIDE)
    yield "long tail, gae", lambda: gae_case(long_tail())
    yield "long tail, loss vanilla", lambda: loss_case("vanilla", with_log_probs(long_tail()))


def numbered(data: Data) -> Data:
    return {**data, "group_B": [int(name.rpartition("-")[2]) for name in data["group_B"]]}


def group_case(name: str, data: Data) -> Case:
    case = advantage_case(name, data, PLAIN)
    peers = {**case.peers, "floor": floors(data)}
    verl_name, options = VERLS.get(name, (name, {}))
    if PEERS and verl_name in VECTORISED_IN_VERL:
        peers["verl's vectorised"] = {"": verl_advantage(f"{verl_name}_vectorized", data, **options)}
    return case._replace(peers=peers, goals={**case.goals, "verl's vectorised": VECTORISED, "floor": FLOOR})


def advantage_case(name: str, data: Data, goal: float) -> Case:
    our_name, our_options = OURS.get(name, (name, {}))
    verl_name, verl_options = VERLS.get(name, (name, {}))
    peers = {"verl": {"": verl_advantage(verl_name, data, **verl_options)}} if PEERS else {}
    return Case(name, our_advantage(our_name, data, **our_options), peers, {"verl": goal}, unmasked(data))


def gae_case(data: Data) -> Case:
    """Whitened beside verl's, which whitens; without it beside torchrl's, which does not."""
    import torch

    data["values_BT"] = torch.randn(data["mask_BT"].shape, generator=torch.Generator().manual_seed(1))
    case = advantage_case("gae", data, GAE)
    if not PEERS:
        return case
    return case._replace(
        peers={**case.peers, TORCHRLS: torchrl_gae(data)},
        goals={**case.goals, TORCHRLS: TORCHRL},
        matching={TORCHRLS: our_advantage("gae", data, whiten=False)},
    )


def our_advantage(name: str, data: Data, **options: Any) -> Run:
    from megarl.algorithms import call, get_advantage

    function = get_advantage(name)
    offered = {**data, **options}
    return lambda: call(function, offered)[0]


def unmasked(data: Data) -> Callable[[Any], Any]:
    return lambda advantages_BT: advantages_BT[data["mask_BT"]]


def loss_case(name: str, data: Data) -> Case:
    """Loss, the metrics that come with it, and the gradient of the log-probs: a step of the actor without its model."""
    import torch

    from megarl.algorithms import Objective, aggregate, call, denominators, get_policy_loss

    aggregation, our_options, verl_options = LOSSES[name]
    leaf = data["log_probs_BT"]
    objective = Objective(policy_loss=name, policy_loss_options=our_options, aggregation=aggregation)
    fields = {
        "old_log_probs": data["old_log_probs_BT"],
        "advantages": data["advantages_BT"],
        "loss_mask": data["mask_BT"],
    }
    counts = denominators(data["mask_BT"])

    def step(loss: Callable[[], torch.Tensor]) -> Run:
        def run() -> torch.Tensor:
            leaf.grad = None
            loss().backward()
            return leaf.grad

        return run

    ours = step(lambda: objective(leaf, None, {**fields, **objective.prepare(fields)}, counts).loss)
    peers = {"verl": {"": step(verl_policy_loss(name, data, aggregation, **verl_options))}} if PEERS else {}
    place = lambda gradient_BT: gradient_BT * counts.tokens  # noqa: E731 (to about 1)
    case = Case(f"loss {name}", ours, peers, {"verl": LOSS}, place, ("verl",) if name in SELECTED_OTHERWISE else ())
    if not PEERS or name not in BARE_IN_VERL:
        return case
    function, offered = get_policy_loss(name), {**data, **our_options}

    def bare() -> torch.Tensor:
        loss_BT = call(function, offered).loss_BT
        return aggregate(loss_BT, data["mask_BT"], aggregation, masked=True) / counts.of(aggregation)

    return case._replace(peers={**peers, BARE: peers["verl"]}, matching={BARE: step(bare)})


# --- measuring, in a process that has the peers on its path ---------------------------------------------------------------------

PEERS = True
TIMER = time.perf_counter


def check(case: Case) -> None:
    """RuntimeError where a peer computes something else than we do."""
    for who, ways in case.peers.items():
        if who == "floor" or who in case.differs:
            continue
        ours = case.place(case.matching.get(who, case.ours)())
        for way, run in ways.items():
            theirs = case.place(run())
            worst = float(((ours - theirs).abs() / theirs.abs().clamp(min=1)).max())
            if not worst <= TOLERANCE:
                raise RuntimeError(f"{case.name}: ours and {way or who} differ by {worst:.2g}")


class Race(NamedTuple):
    """Seconds of every round, by who; `ours` has an entry for each peer, and one under ""."""

    ours: dict[str, list[float]]
    theirs: dict[str, list[float]]


def race(case: Case) -> Race:
    """Of a peer's several ways the one with the least median counts. One that takes three times as long as another in the
    first round, which is not counted, is left out."""
    runs = {("ours", who): run for who, run in {"": case.ours, **case.matching}.items()}
    runs |= {(who, way): run for who, ways in case.peers.items() for way, run in ways.items()}
    first = {key: clock(run) for key, run in runs.items()}
    for who, way in list(runs):
        if who != "ours" and first[who, way] > 3 * min(first[key] for key in first if key[0] == who):
            del runs[who, way]
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, round(SECONDS / sum(first[key] for key in runs))))
    keys = list(runs)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in keys}
    for number in range(rounds):
        turn = number % len(keys)
        for key in keys[turn:] + keys[:turn]:
            seconds[key].append(clock(runs[key]))
    theirs: dict[str, list[float]] = {}
    for (who, _), found in seconds.items():
        if who != "ours" and (who not in theirs or median(found) < median(theirs[who])):
            theirs[who] = found
    return Race({way: found for (who, way), found in seconds.items() if who == "ours"}, theirs)


def clock(run: Run) -> float:
    begin = TIMER()
    result = run()
    end = TIMER()
    del result
    return end - begin


def time_rows(case: Case) -> list[Row]:
    ours, theirs = race(case)
    rows = [plain(f"{case.name}: ours, ms", 1e3 * median(ours[""]))]
    rows += [plain(f"{case.name}: {who}, ms", 1e3 * median(found)) for who, found in theirs.items()]
    for who, found in theirs.items():
        mine = ours.get(who, ours[""])
        if who == "floor":
            rows.append(at_most(f"{case.name}: time ÷ the floor's", ratio(mine, found), case.goals[who]))
            continue
        name, goal = f"{case.name}: {who} ÷ ours, time", case.goals.get(who)
        if goal is None:
            rows.append(plain(name, ratio(found, mine)))
            continue
        limit = ratio(found, theirs["floor"]) if "floor" in theirs else goal
        if limit < goal:  # then what we lack is not ours alone to give
            name += " (the floor does not reach this either)"
        rows.append(at_least(name, ratio(found, mine), goal))
        if limit < goal:
            rows.append(plain(f"{case.name}: {who} ÷ the floor, time: the most there is", limit))
    return rows


def ratio(upper: list[float], lower: list[float]) -> float:
    """The median over rounds of the ratio within a round: what slows a round slows both."""
    return median(above / below for above, below in zip(upper, lower, strict=True))


def memory_rows(case: Case, small: Case) -> list[Row]:
    ours = peak_growth(case.ours, small.ours)
    rows = [plain(f"{case.name}: peak memory, MiB", ours)]
    theirs = [
        peak_growth(run, small.peers[who][way])
        for who, ways in case.peers.items()
        if who.startswith("verl")
        for way, run in ways.items()
    ]
    if theirs:
        rows.append(at_most(f"{case.name}: peak memory ÷ verl's least", ours / min(theirs), MEMORY))
    return rows


def peak_growth(run: Run, small: Run) -> int:
    """MiB by which one call raises the resident set, in a forked process: it starts with the inputs, and its record is new.

    The same on small inputs comes first: a fork maps the code that it runs anew. Rounded up: the kernel counts in batches
    of pages."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            small()
            before = resident("VmRSS")
            run()
            os.write(write, str(resident("VmHWM") - before).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with open(read) as answer:
        growth = answer.read()
    if os.waitpid(child, 0)[1] or not growth:
        raise RuntimeError("a process forked to measure memory failed; see above")
    return max(1, math.ceil(int(growth) / 2**20))


def resident(field: str) -> int:
    kilobytes = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert kilobytes is not None
    return 1024 * int(kilobytes[1])


class Kind(NamedTuple):
    """What one process measures: the cases whose name this matches, under this environment."""

    cases: str
    env: Callable[[int], dict[str, str]]
    threads: bool = True


def as_driver(threads: int) -> dict[str, str]:
    """Estimators run in the driver, alone, which asks for huge pages as megarl.cli does."""
    return {"OMP_NUM_THREADS": str(threads), "THP_MEM_ALLOC_ENABLE": "1"}


def reused_pages(threads: int) -> dict[str, str]:
    """As the driver, but freed memory stays in the process: what is compared is work, not the kernel's zeroing of pages."""
    return as_driver(threads) | {name: value for name, value in process_env(threads).items() if "MALLOC" in name}


def counted_pages(threads: int) -> dict[str, str]:
    """Every large block is mapped when taken and unmapped when given back, in small pages: what is resident is in use."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 17),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 17),
        "MALLOC_TOP_PAD_": "0",
    }


KINDS = {
    "": Kind("^(?!.*loss )", reused_pages),
    "loss": Kind("loss ", process_env),  # as in the ranks
    "fresh pages": Kind("^(grpo|rloo|gae|long tail, (grpo|gae))$", as_driver),
    "memory": Kind(
        "", counted_pages, threads=False
    ),  # counted in forks, which must not inherit a started pool of threads
}


def work(kind: str, size: Size, only: str, peers: str, threads: int, busy: bool = False) -> list[Row]:
    """All rows of one kind."""
    global PEERS, TIMER
    if busy:
        threads, TIMER = 1, time.thread_time
    warnings.simplefilter("ignore")
    PEERS = bool(peers)
    if peers:
        sys.path.append(peers)  # at the end: what both environments have is ours
    import torch

    if PEERS:
        import_peers()
    torch.set_num_threads(threads if KINDS[kind].threads else 1)
    rows: list[Row] = []
    small = dict(cases(QUICK))
    for name, build in cases(size):
        if not (re.search(KINDS[kind].cases, name) and re.search(only, name)):
            continue
        case = build()._replace(name=f"{kind}, {name}" if kind == "fresh pages" else name)
        if kind != "memory":
            check(case)
        gc.collect()
        gc.freeze()  # the collector's walks through imported modules are nobody's time
        new = memory_rows(case, small[name]()) if kind == "memory" else time_rows(case)
        gc.unfreeze()
        if size is QUICK:  # of such sizes nothing is asked
            new = [plain(row.name, row.value) for row in new]
        print(text(new), file=sys.stderr, flush=True)
        rows += new
        del case
    return rows


# --- the program ----------------------------------------------------------------------------------------------------------------


def peers_folder() -> Path:
    """The folder with the peers, installed on first use. UserError where that is not possible."""
    folder = cache_dir() / "bench-estimators"
    stamp = folder / ".installed"
    with locked(folder.name):
        if stamp.exists() and stamp.read_text() == "\n".join(PACKAGES):
            return folder
        print(f"installing {', '.join(PACKAGES[:2])} into {folder} …", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--retries", "1"]
        done = subprocess.run(
            [*pip, "--no-deps", "--upgrade", "--target", str(folder), *PACKAGES],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise UserError(
                f"verl and torchrl cannot be installed here, most likely because there is no network ({why}); "
                "with --no-peers only the memory floor is measured."
            )
        stamp.write_text("\n".join(PACKAGES))
    return folder


def run_worker(kind: str, args: argparse.Namespace, peers: str) -> list[Row]:
    unset = ("OMP_WAIT_POLICY", "MKL_NUM_THREADS")
    inherited = {name: value for name, value in os.environ.items() if name not in unset and "MALLOC" not in name}
    env = inherited | KINDS[kind].env(os.cpu_count() or 1)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.estimators", "--worker", kind, "--peers", peers]
    command += ["--only", args.only, *(["--quick"] if args.quick else []), *(["--busy"] if args.busy else [])]
    done = subprocess.run(command, env=env, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)  # it has said why
    return [Row(*row) for row in json.loads(done.stdout.splitlines()[-1])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: that it runs, not how fast")
    parser.add_argument(
        "--busy", action="store_true", help="processor time of one thread, for a machine with other work"
    )
    parser.add_argument("--no-peers", action="store_true", help="only ours and the floor: nothing is installed")
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=tuple(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--peers", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        size = QUICK if args.quick else FULL
        rows = work(args.worker, size, args.only, args.peers, os.cpu_count() or 1, args.busy)
        print(json.dumps(rows))
        return 0
    try:
        peers = "" if args.no_peers else str(peers_folder())
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    rows = [row for kind in KINDS for row in run_worker(kind, args, peers)]
    missed = [row for row in rows if not row.met]
    print(f"{len(rows)} rows, {len(missed)} goals not met" + (":" if missed else ""))
    print(text(missed))
    if args.json:
        write_json(args.json, rows)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
