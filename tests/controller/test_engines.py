"""Two real engines as one: shared work, what is unfinished goes on, filters; and what happens when one is lost."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl import config
from megarl.batch import Batch, Level, Prompt
from megarl.bridge.model_map import ModelMap
from megarl.controller.calls import ProcessLost
from megarl.controller.cluster import cluster
from megarl.controller.engines import EngineGroup
from megarl.controller.rollout import Generated, GroupSelection
from megarl.errors import RunError
from megarl.models.tiny import make_tiny
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.colocated import Colocated
from megarl.reshard.fingerprint import fingerprint
from megarl.reshard.stream import Stream
from megarl.reshard.transfer import Member
from megarl.rollout import session
from megarl.rollout.sampling import Sampling
from tests.controller.runs import CONFIG, processes
from tests.reshard.whole import Whole

LONG = Sampling(n=4, max_new_tokens=200, temperature=1.0)


class Weights:
    """What a trainer would give: tensors in one bucket, proved to have arrived."""

    def __init__(self, folder: Path):
        self.directory = Path(tempfile.mkdtemp(prefix="megarl-test-", dir="/dev/shm"))
        self.tensors = {}
        self.version = 0
        self.given: list[int] = []
        self.use(folder, 0)

    def use(self, folder: Path, version: int) -> None:
        self.tensors = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
        self.version = version

    def give(self, receivers) -> None:
        shapes = [(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]
        spec = BucketSpec.plan(str(self.directory / "bucket"), shapes, prove=self.tensors)
        spec.create()
        for name, view in spec.views().items():
            view.copy_(self.tensors[name])
        receivers.begin_update(self.version)
        receivers.loaded(receivers.load([spec]))
        for prints in receivers.end_update():
            assert prints == {name: fingerprint(t) for name, t in self.tensors.items()}
        self.given.append(self.version)

    def close(self) -> None:
        shutil.rmtree(self.directory)


class Crew:
    """The engines of this file, with their weights and what was said of them."""

    def __init__(self, folder: Path, other: Path):
        self.folder, self.other = folder, other
        self.notes: list[str] = []
        overrides = ["rollout.max_new_tokens=48", "rollout.max_total_tokens=8192", "rollout.timeout=240"]
        self.config = config.load(CONFIG, overrides)
        self.engines = EngineGroup(
            self.config, folder, engines=2, max_restarts=3, progress_timeout=20.0, note=self.notes.append
        )
        self.weights = Weights(folder)
        self.engines.renew = self.weights.give
        self.engines.ready()

    def fresh(self) -> Crew:
        """As after the first weight update, whatever a test did."""
        import ray

        for slot in self.engines.slots:  # what a generation that ended in an error left behind
            with contextlib.suppress(RunError, ray.exceptions.RayError):
                while ray.get(slot.actor.ready.remote())["sampling"]:
                    ray.get(slot.actor.exchange.remote([], LONG, 1.0, True))
        self.weights.use(self.folder, 1)
        self.weights.give(self.engines)
        self.engines.score([[5, 6]])  # waits for who is being started anew
        self.engines.restarts = 0
        self.notes.clear()
        return self

    def pids(self, number: int) -> dict[str, int]:
        """The processes of one engine: its host, and SGLang's scheduler."""
        host = self.engines.slots[number].info["pid"]
        scheduler = next(pid for pid, title in processes(host).items() if "scheduler" in title)
        return {"host": host, "scheduler": scheduler}

    def tokens(self, number: int) -> int:
        import ray

        return ray.get(self.engines.slots[number].actor.exchange.remote([], LONG, 0.0)).tokens


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    folder, other = (tmp_path_factory.mktemp("models") / name for name in ("one", "other"))
    make_tiny("qwen3", folder)
    make_tiny("qwen3", other, seed=1)
    with cluster(config.load(CONFIG, []).cluster, tmp_path_factory.mktemp("logs")), contextlib.ExitStack() as stack:
        running = Crew(folder, other)
        stack.callback(running.weights.close)
        stack.callback(running.engines.shutdown)
        yield running


def prompts(count: int, prefix: str = "p") -> list[Prompt]:
    generator = torch.Generator().manual_seed(count)
    return [
        Prompt(f"{prefix}{i}", torch.randint(5, 300, (3 + 5 * (i % 4),), generator=generator).tolist())
        for i in range(count)
    ]


def check_whole(samples, asked, n: int) -> None:
    """Every prompt's samples, once each, in the prompts' order."""
    assert [s.uid for s in samples] == [p.uid for p in asked for _ in range(n)]
    assert [s.prompt_ids for s in samples] == [p.token_ids for p in asked for _ in range(n)]
    assert set(Counter(s.group for s in samples).values()) == {n}
    assert len({tuple(s.response_ids) for s in samples}) == len(samples)
    for sample in samples:
        sample.check()
        assert sample.stop_reason in ("stop", "length") and sample.response_ids


def test_work_is_shared_and_order_restored(crew):
    before = [crew.fresh().tokens(number) for number in (0, 1)]
    asked = prompts(7)
    check_whole(crew.engines.generate(asked, Sampling(n=3, max_new_tokens=24), "@1"), asked, 3)
    sampled = [crew.tokens(number) - before[number] for number in (0, 1)]
    assert min(sampled) > 0.2 * sum(sampled)


def log_probs(folder: Path, prompt: list[int], response: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def test_what_is_unfinished_goes_on_under_other_weights(crew):
    """Every token's log-prob is that of the very weights that its version names."""
    engines = crew.fresh().engines
    supply = iter(prompts(40, "q"))
    selection = GroupSelection(more=lambda k: [next(supply) for _ in range(k)], oversample=3.0, unfinished="keep")
    # Responses of very different lengths, so that some are still sampled when enough groups are finished.
    settings = replace(crew.config.rollout, max_new_tokens=200)
    rollout = Generated(engines, settings, selection=selection, stop_token_ids=range(10, 18))
    first = rollout.collect(prompts(2), 1)
    assert len(first) == 8 and first.meta["rollout"]["asked"] == 6 and first.meta["rollout"]["unfinished"] >= 1
    crew.weights.use(crew.other, 2)
    crew.weights.give(engines)
    mixed: list = []
    batches = [first]
    while not mixed:
        batches.append(rollout.collect([next(supply), next(supply)], 1 + len(batches)))
        samples = batches[-1].to_samples()
        mixed = [s for s in samples if len(set(s.token_versions)) > 1]
    assert sum(batch.meta["rollout"]["resumed"] for batch in batches) >= 1
    for sample in mixed:
        versions = torch.tensor(sample.token_versions)
        assert versions.tolist() == sorted(versions.tolist()) and set(versions.tolist()) == {1, 2}
        assert sample.weight_version == 1 and len(sample.response_ids) <= 200
        exact = torch.where(
            versions == 1,
            log_probs(crew.folder, sample.prompt_ids, sample.response_ids),
            log_probs(crew.other, sample.prompt_ids, sample.response_ids),
        )
        assert (torch.tensor(sample.rollout_log_probs) - exact).abs().max() <= 1e-5
    groups = [group for batch in batches for group in set(batch["group"])]
    assert len(groups) == len(set(groups))  # no group twice


@pytest.mark.slow
def test_one_is_lost_while_all_have_given_their_memory_back(crew):
    """It is started anew with all its memory; the others take theirs, the weights fill it, and every response is what it was."""
    engines, asked = crew.fresh().engines, prompts(6)
    before = engines.generate(asked, Sampling(n=3, max_new_tokens=24), "@1")
    engines.config.rollout.release_memory = "all"
    try:
        engines.release()
        assert [slot.released for slot in engines.slots] == [{"cache", "weights"}] * 2
        with pytest.raises(RunError, match="the memory of its cache and weights is released"):
            engines.generate(asked, Sampling(max_new_tokens=8), "@2")
        os.kill(crew.pids(1)["scheduler"], signal.SIGKILL)
        engines.resume("weights")
        crew.weights.give(engines)
        engines.resume("cache")
        assert [slot.released for slot in engines.slots] == [set()] * 2 and len(crew.notes) == 1
        after = engines.generate(asked, Sampling(n=3, max_new_tokens=24), "@1")
        assert [s.response_ids for s in after] == [s.response_ids for s in before]
    finally:
        engines.config.rollout.release_memory = "off"


def test_the_filter_gets_scored_groups_while_others_are_sampled(crew):
    engines = crew.fresh().engines
    supply = iter(prompts(40, "q"))
    seen: list[tuple[str, int]] = []

    def score(batch: Batch) -> Batch:
        return batch.select([]).set("reward", batch.response_lengths.float(), Level.SAMPLE)

    def keep(batch: Batch) -> bool:
        assert len(set(batch["group"])) == 1 and len(batch) == 4
        seen.append((batch["uid"][0], time.monotonic()))
        return int(batch["uid"][0][1:]) % 2 == 0

    selection = GroupSelection(score, keep, more=lambda k: [next(supply) for _ in range(k)], oversample=1.5)
    batch = Generated(engines, crew.config.rollout, selection=selection).collect(prompts(3), 5)
    assert len(batch) == 12 and batch["reward"].tolist() == batch.response_lengths.tolist()
    assert all(int(uid[1:]) % 2 == 0 for uid in batch["uid"])
    assert batch.meta["rollout"]["rejected"] == sum(int(uid[1:]) % 2 for uid, _ in seen) >= 1
    order = [(uid[0] == "q", int(uid[1:])) for uid in batch["uid"]]
    assert order == sorted(order)
    never = GroupSelection(keep=lambda _: False, more=lambda k: [next(supply) for _ in range(k)], limit=2)
    with pytest.raises(RunError, match="4 groups were sampled and 0 of 2 passed the filter; rollout.filter_limit"):
        Generated(engines, crew.config.rollout, selection=never).collect(prompts(2), 6)


def later(crew, number: int, process: str, sent: signal.Signals, after: float) -> threading.Thread:
    def send() -> None:
        time.sleep(after)
        os.kill(crew.pids(number)[process], sent)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.slow
def test_killed_twice_in_one_step_and_every_sample_is_there_once(crew):
    engines = crew.fresh().engines
    crew.weights.use(crew.other, 2)
    crew.weights.give(engines)
    crew.weights.given.clear()
    asked = prompts(24)
    threads = [
        later(crew, 0, "scheduler", signal.SIGKILL, 0.3),
        later(crew, 1, "host", signal.SIGKILL, 0.8),
    ]
    samples = engines.generate(asked, LONG, "@2")
    for thread in threads:
        thread.join()
    check_whole(samples, asked, 4)
    assert {s.weight_version for s in samples} == {2} and 2 in crew.weights.given
    worst = max(
        float((torch.tensor(s.rollout_log_probs) - log_probs(crew.other, s.prompt_ids, s.response_ids)).abs().max())
        for s in samples[::12]
    )
    assert worst <= 1e-5
    assert len(crew.notes) == 2 and all("\n" not in note for note in crew.notes)
    assert all("unfinished responses are sampled again: " in note for note in crew.notes)
    # SGLang needs a while to see that its scheduler is gone: either may be known first
    assert {note.split(" is started anew")[0] for note in crew.notes} == {"rollout engine 0", "rollout engine 1"}
    assert all("SIGKILL" in note for note in crew.notes)
    assert ["(1 of 3 in this step)" in crew.notes[0], "(2 of 3 in this step)" in crew.notes[1]] == [True, True]
    crew.weights.give(engines)  # both are back, and take part
    assert engines.restarts == 0 and all(slot.current for slot in engines.slots)


@pytest.mark.slow
def test_an_engine_that_hangs(crew):
    engines = crew.fresh().engines
    asked = prompts(24)
    thread = later(crew, 1, "scheduler", signal.SIGSTOP, 1.0)
    samples = engines.generate(asked, LONG, "@2")
    thread.join()
    check_whole(samples, asked, 4)
    assert len(crew.notes) == 1 and "hangs: no token of" in crew.notes[0]


@pytest.mark.slow
def test_an_engine_that_answers_garbage(crew):
    """Weights of NaN behind everybody's back: what is sampled from them has no log-probs."""
    from megarl.controller.engines import _One

    engines = crew.fresh().engines
    right = dict(crew.weights.tensors)
    crew.weights.tensors = {name: torch.full_like(t, float("nan")) for name, t in right.items()}
    crew.weights.give(_One(engines, engines.slots[1]))
    crew.weights.tensors = right
    asked = prompts(8)
    check_whole(engines.generate(asked, Sampling(n=2, max_new_tokens=16), "@2"), asked, 2)
    assert len(crew.notes) == 1 and "rollout engine 1" in crew.notes[0]


@pytest.mark.slow
def test_lost_in_a_weight_update(crew):
    engines = crew.fresh().engines
    os.kill(crew.pids(0)["host"], signal.SIGKILL)
    crew.weights.use(crew.other, 3)
    crew.weights.give(engines)  # the other engine has them
    assert [slot.current for slot in engines.slots] == [False, True]
    scores = engines.score([[5, 6, 7, 8]])  # asks all: waits for the one that comes back, and gives it the weights
    assert scores[0][0] == pytest.approx(scores[1][0], abs=1e-6)
    assert crew.weights.given[-2:] == [3, 3] and len(crew.notes) == 1


@pytest.mark.slow
def test_a_rank_that_is_lost_while_it_renews_an_engine_is_not_the_engine_s_loss(crew):
    engines = crew.fresh().engines

    def lost(receivers):
        raise ProcessLost("writing weights: trainer rank 1 died: it was killed")

    engines.renew, before = lost, engines.renew
    try:
        os.kill(crew.pids(0)["host"], signal.SIGKILL)
        with pytest.raises(RunError, match="trainer rank 1 died"):
            engines.score([[5, 6, 7, 8]])
        assert engines.restarts == 1
    finally:
        engines.renew = before


class _Spoiling(Whole):
    """Sends an engine's scheduler a signal when the weights are on their way to it."""

    def __init__(self, folder: Path, pid: int, number: int):
        super().__init__(folder)
        self.spoil = lambda: os.kill(pid, number)

    def write_stream(self, stream: Stream) -> list[dict[str, int]]:
        self.spoil()
        return super().write_stream(stream)

    def write_in_place(self, members: Sequence[Member]) -> None:
        self.spoil()
        super().write_in_place(members)


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_lost_while_it_takes_weights_holds_nobody_up(crew, number, in_place):
    crew.fresh()
    crew.weights.use(crew.other, 4)  # what one that is started anew is given
    options = {"dtype": "float32", "bucket_bytes": 100_000, "in_place": in_place}
    transfer = Colocated(ModelMap.from_hf(crew.other), verify="off", **options)
    try:
        if in_place:  # the first goes through buckets
            transfer.push(Whole(crew.folder), crew.engines, 3)
            spoiling = _Spoiling(crew.other, crew.pids(1)["scheduler"], number)
            spoiling.open(transfer._open)
            transfer.push(spoiling, crew.engines, 4)
        else:
            transfer.push(_Spoiling(crew.other, crew.pids(1)["scheduler"], number), crew.engines, 4)
    finally:
        transfer.close()
    samples = crew.engines.generate(prompts(6), Sampling(n=2, max_new_tokens=8), "@4")
    check_whole(samples, prompts(6), 2)
    assert {sample.weight_version for sample in samples} == {4}
    scores = crew.engines.score([[5, 6, 7, 8]])  # waits for the one that comes back
    exact = log_probs(crew.other, [5], [6, 7, 8])
    assert all((exact - torch.tensor(score[0])).abs().max() <= 1e-5 for score in scores) and len(scores) == 2
    assert crew.engines.restarts == 1 and crew.weights.given[-1] == 4


@pytest.mark.slow
def test_lost_too_often(crew):
    engines = crew.fresh().engines
    engines.max_restarts, before = 1, engines.max_restarts
    try:
        threads = [later(crew, 0, "host", signal.SIGKILL, 0.5), later(crew, 1, "host", signal.SIGKILL, 1.0)]
        with pytest.raises(
            RunError, match=r"engine . was lost, and 1 were started anew in this step already"
        ) as caught:
            engines.generate(prompts(24), LONG, "@2")
        for thread in threads:
            thread.join()
        assert "\n" not in str(caught.value)
    finally:
        engines.max_restarts = before


def held() -> dict[str, int]:
    """What this process and its engines hold of the machine."""
    import ray

    gc.collect()  # tracebacks of losses refer to each other
    core = ray._private.worker.global_worker.core_worker
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "shared memory": len(list(Path("/dev/shm").glob("megarl-*"))),
        "temporary": len(list(Path(tempfile.gettempdir()).glob("megarl-engine-*"))),
        "processes": len(processes(os.getpid())),
        "references": len(core.get_all_reference_counts()),
    }


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_steps_with_partial_rollouts_and_losses_leave_nothing_behind(crew):
    engines = crew.fresh().engines
    numbers = iter(range(10**6))

    def more(k: int) -> list[Prompt]:
        return [Prompt(f"s{next(numbers)}", [5 + next(numbers) % 300 for _ in range(6)]) for _ in range(k)]

    rollout = Generated(
        engines, crew.config.rollout, selection=GroupSelection(more=more, oversample=2.0, unfinished="keep")
    )
    whole = Whole(crew.folder)
    transfer = Colocated(
        ModelMap.from_hf(crew.folder), dtype="float32", bucket_bytes=100_000, verify="full", in_place=True
    )
    seen: set[str] = set()
    before: dict[str, int] = {}
    resumed = 0
    shared: set[Path] = set()
    for step in range(1, 51):
        if step % 10 == 0:
            shared |= session.shared_files(crew.pids(step // 10 % 2)["host"])
        thread = later(crew, step // 10 % 2, "host", signal.SIGKILL, 0.2) if step % 10 == 0 else None
        batch = rollout.collect(more(4), step)
        if thread is not None:
            thread.join()
        groups = set(batch["group"])
        assert len(batch) == 16 and len(groups) == 4 and not groups & seen
        seen |= groups
        resumed += batch.meta["rollout"]["resumed"]
        crew.weights.use(crew.other if step % 2 else crew.folder, step + 1)
        whole.tensors = crew.weights.tensors
        transfer.push(whole, engines, step + 1)  # in place, but after a loss
        if step == 15:
            before, resident = held(), resident_mb()
    assert len(crew.notes) == 5 and resumed > 20
    after = held()
    assert all(after[name] <= before[name] + 2 for name in before), (before, after)
    assert resident_mb() < resident + 50
    assert shared and not [path for path in shared if path.exists()]
    transfer.close()
    mapped = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "megarl-weights" in line}
    assert len(mapped) == 2  # of the engines that run, and of none that was lost
