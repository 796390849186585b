"""`megarl plan` as a person meets it: what it prints and writes, what it says of bad input, and that a change it names does mend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl import cli
from megarl.bridge.grid import seat
from megarl.bridge.states import buffer
from megarl.config import load, problems
from megarl.config.schema import ParallelConfig
from megarl.controller.pools import devices
from megarl.plan import hardware
from megarl.plan.memory import PHASES

ROOT = Path(__file__).parents[2]
SCALE = sorted((ROOT / "configs/scale").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the models of configs/scale are named from there


def plan(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and what was written."""
    code = cli.main(["plan", *arguments, "--json", str(tmp_path / "plan.json")])
    return code, json.loads((tmp_path / "plan.json").read_text())


def machine(tmp_path: Path, like: str, **changes: Any) -> str:
    """A file of hardware."""
    facts = yaml.safe_load((hardware.FOLDER / f"{like}.yaml").read_text()) | changes
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({k: v for k, v in facts.items() if v is not None}))
    return str(tmp_path / "mine.yaml")


def test_every_rank_and_phase_is_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = plan(tmp_path, "configs/tiny.yaml", "--hardware", "laptop")
    said = capsys.readouterr().out
    assert code == 0 and facts["fits"] and said.splitlines()[-1].startswith("fits: all that runs on a node")
    assert [(load["rank"], load["phase"]) for load in facts["ranks"]] == [(r, p) for r in (0, 1) for p in PHASES]
    update = next(load for load in facts["ranks"] if load["phase"] == "update")
    assert update["works"] == "actor" and update["activations"] > 0
    # float32, one data-parallel rank: gradients as large as parameters, two averages and a count of steps
    assert update["gradients"] == update["parameters"]
    assert update["optimizer"] - 2 * update["parameters"] in range(4, 1000, 4)
    assert all(title in said for title in ("held, MiB", "actor's ranks, MiB", "tensor parallel", "sent in a step"))
    assert facts["node"]["update"] == max(facts["node"].values())


@pytest.mark.parametrize("where", ["h100", "laptop"])
def test_engines_that_give_memory_back_leave_it_to_the_ranks(where: str, tmp_path: Path) -> None:
    held = {}
    for what in ("off", "cache", "all"):
        code, facts = plan(tmp_path, "configs/tiny.yaml", "--hardware", where, f"rollout.release_memory={what}")
        loads = {load["phase"]: load for load in facts["ranks"] if load["rank"] == 0}
        total = facts["node"] if where == "laptop" else {p: loads[p]["engine"] + loads[p]["cache"] for p in PHASES}
        assert code == 0 and list(total) == list(PHASES)
        held[what] = total
    cache = held["off"]["sync"] - held["cache"]["sync"]
    weights = held["cache"]["update"] - held["all"]["update"]
    assert cache > 0 < weights
    for what, given in {"cache": cache, "all": cache + weights}.items():
        fallen = {phase: held["off"][phase] - held[what][phase] for phase in PHASES}
        assert fallen == {"rollout": 0, "log-probs": given, "update": given, "sync": cache}


def test_engines_in_float8_hold_and_are_sent_half(tmp_path: Path) -> None:
    found = {}
    for kind in ("null", "fp8"):
        command = ["configs/scale/ppo_qwen3_8b_16xh100.yaml", f"rollout.quantization={kind}"]
        code, facts = plan(tmp_path, *command)
        assert code == 0
        found[kind] = next(load["engine"] for load in facts["ranks"] if load["engine"])
    assert 0.5 < found["fp8"] / found["null"] < 0.62  # embedding and output layer stay


def test_roles_and_pools_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["critic.parallel.ranks=2", "critic.parallel.tensor=2", "reference.offload=all"]
    code, facts = plan(tmp_path, "configs/recipes/ppo.yaml", "--hardware", "h100", *own)
    assert code == 0
    works = {(load["pool"], load["phase"]): load["works"] for load in facts["ranks"] if load["rank"] == 0}
    assert works["critic", "update"] == "critic" and works["actor", "update"] == "actor"
    assert works["critic", "sync"] == "" and works["actor", "rollout"] == ""
    loads = {load["phase"]: load for load in facts["ranks"] if load["pool"] == "actor" and load["rank"] == 0}
    assert "critic's ranks" in capsys.readouterr().out
    _, facts = plan(tmp_path, "configs/recipes/ppo.yaml", "--hardware", "h100", *own[:2])
    there = next(load for load in facts["ranks"] if load["pool"] == "actor" and load["phase"] == "rollout")
    assert loads["rollout"]["host"] == there["parameters"] - loads["rollout"]["parameters"] > 0 == there["host"]


def test_engines_apart_and_roles_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an engine holds is on its own GPU, and in a pool of two roles one makes room for the other."""
    ppo = ["configs/recipes/ppo.yaml", "--hardware", "h100", "critic.parallel.ranks=1", "reward_model.pool=critic"]
    ppo += ["critic.offload=all", "reshard.transport=distributed"]
    _, shared = plan(tmp_path, *ppo)
    assert "rollout: 1 engine of 1 rank, on the actor's devices" in capsys.readouterr().out
    code, apart = plan(tmp_path, *ppo, "rollout.pool=rollout")
    said = capsys.readouterr().out
    assert (
        code == 0
        and "critic, with reward_model: 1 rank" in said
        and "rollout's ranks" in said
        and "1 rank, apart" in said
    )

    def load(facts: dict[str, Any], pool: str, phase: str) -> dict[str, Any]:
        return next(x for x in facts["ranks"] if (x["pool"], x["phase"], x["rank"]) == (pool, phase, 0))

    for phase in PHASES:
        one, (actor, engine) = load(shared, "actor", phase), (load(apart, pool, phase) for pool in ("actor", "rollout"))
        assert one["engine"] == engine["engine"] > 0 and one["cache"] == engine["cache"] > 0
        assert actor["engine"] == actor["cache"] == 0 and one["total"] == actor["total"] + engine["total"]
    assert load(apart, "critic", "log-probs")["host"] > 0 == load(apart, "critic", "update")["host"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hardware", "h10"], "there is no hardware 'h10', nor a file of that name"),
        (["--rank", "0"], "--rank names ranks that --dry-run builds; add --dry-run"),
        (["--json", "nowhere/plan.json"], "there is no folder nowhere"),
        (["rollout.top_p=2"], "rollout.top_p is 2.0; it must be above 0 and at most 1"),
        (["actor.parallel.tensor=3"], "does not divide by tensor*pipeline*context=3*1*1"),
        (["model.path=nowhere"], "There is no model folder nowhere"),
        (["--hardware", "h100", "actor.parallel.ranks=16", "cluster.nodes=1", "cluster.address=auto"],
         "actor.parallel.ranks=16 but cluster.nodes=1 machines of 8 H100 have 8 GPUs; make them fewer or cluster.nodes=2"),
        (["--hardware", "h100", "actor.parallel.ranks=9", "actor.parallel.tensor=9"],
         "actor.parallel.tensor=9: a tensor-parallel group is kept inside a node, and a node has 8 H100"),
        (["--hardware", "h100", "rollout.pool=rollout", "rollout.engines=7"],
         "reshard.transport=colocated moves weights through one node's memory, where actor and engines take 9 devices, and a node"),
        (["--hardware", "a100", "model.dtype=bfloat16", "actor.precision.fp8=mxfp8"],
         "needs a GPU of compute capability 10.0 or higher, and this one has 8.0"),
        (["--dry-run", "--rank", "5"], "--rank 5: the actor's ranks are 0 to 1"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "configs/tiny.yaml", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory_gb": 3}, "unknown key memory_gb; did you mean memory_gib?"),
        ({"devices": None}, "lacks devices"),
        ({"devices": 0}, "devices=0 is not what is asked for there"),
        ({"memory_gib": "80"}, "memory_gib='80' is not what is asked for there"),
        ({"reserved_gib": 80}, "reserved_gib=80 leaves nothing of memory_gib=79"),
    ],
)
def test_a_file_of_hardware_that_is_not_understood(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(hardware.UserError) as caught:
        hardware.find(machine(tmp_path, "h100", **changes))
    assert said in str(caught.value)


def test_all_hardware_of_ours_is_understood() -> None:
    assert set(hardware.names()) == {"laptop", "a100", "h100", "h200", "b200"}
    assert all(hardware.find(name).usable > 0 for name in hardware.names())
    assert hardware.here().memory_gib > 0


LARGE = ("actor.micro_batch_tokens=262144", "data.prompts_per_step=128")


@pytest.mark.parametrize(
    ("like", "memory", "overrides", "named"),
    [
        ("laptop", 3.2, LARGE, "actor.micro_batch_tokens"),
        ("h100", 0.05, LARGE, "actor.micro_batch_tokens"),
        ("h100", 0.0095, (), "actor.recompute"),  # and more beside it
    ],
)
def test_the_change_that_is_named_makes_it_fit(
    tmp_path: Path, like: str, memory: float, overrides: tuple[str, ...], named: str
) -> None:
    small = machine(tmp_path, like, memory_gib=memory, reserved_gib=0.0)
    code, facts = plan(tmp_path, "configs/tiny.yaml", "--hardware", small, *overrides)
    assert code == 1 and not facts["fits"] and named in facts["change"], facts["verdict"]
    change = [f"{key}={value}" for key, value in facts["change"].items()]
    assert facts["verdict"].endswith(f"{' '.join(change)} would fit")
    code, facts = plan(tmp_path, "configs/tiny.yaml", "--hardware", small, *overrides, *change)
    assert code == 0, facts["verdict"]


def test_a_buffer_is_shared_out_whole() -> None:
    """Every element has one owner; what lies alone is padded alone."""
    sizes, alone = [70, 3, 500, 64, 1, 129], [True, False, False, False, False, True]
    for ranks in (1, 3, 4, 7):
        found = buffer(sizes, alone, ranks)
        assert sum(found.owned) == sum(sizes) and len(found.owned) == ranks
        assert found.elements % ranks == 0 and found.elements % 128 == 0
    assert buffer([70], [False], 2).owned == [64, 6]
    assert buffer([], [], 2).elements == 0


def test_every_rank_has_a_seat_of_its_own() -> None:
    layout = ParallelConfig(ranks=48, tensor=2, pipeline=3, context=2, expert=4, expert_tensor=1)
    seats = [seat(rank, layout) for rank in range(48)]
    assert len({(s.tensor, s.context, s.data, s.pipeline) for s in seats}) == 48
    assert len({(s.expert_tensor, s.expert, s.expert_data, s.pipeline) for s in seats}) == 48
    assert {s.expert_data_size for s in seats} == {4} and {s.replica for s in seats} == set(range(8))


@pytest.mark.parametrize("path", SCALE, ids=lambda path: path.stem)
def test_configurations_of_scale_are_sound(path: Path) -> None:
    assert problems(load(path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("path", SCALE, ids=lambda path: path.stem)
def test_configurations_of_scale_fit_and_megatron_builds_what_is_planned(path: Path, tmp_path: Path) -> None:
    code, facts = plan(tmp_path, str(path), "--dry-run")
    assert code == 0 and facts["fits"]
    assert len(facts["dry_run"]) >= 2 and all(one["equal"] for one in facts["dry_run"])
    assert len(facts["ranks"]) == devices(load(path)) * len(PHASES)


@pytest.mark.slow
def test_the_demo_fits_a_laptop_and_the_dry_run_agrees(tmp_path: Path) -> None:
    code, facts = plan(tmp_path, "configs/demo.yaml", "--hardware", "laptop", "--dry-run")
    assert code == 0 and facts["fits"] and [one["equal"] for one in facts["dry_run"]] == [True]


@pytest.mark.slow
def test_a_dry_run_of_several_roles_and_ranks(tmp_path: Path) -> None:
    layout = "actor.parallel={ranks: 8, tensor: 2, pipeline: 2, sequence: true}"
    code, facts = plan(
        tmp_path, "configs/recipes/ppo.yaml", "--hardware", "h100", layout, "--dry-run", "--rank", "0", "5", "7"
    )
    assert code == 0 and {one["rank"] for one in facts["dry_run"]} == {0, 5, 7}
    assert {one["role"] for one in facts["dry_run"]} == {"actor", "reference", "critic", "reward_model"}
