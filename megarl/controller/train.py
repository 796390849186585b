"""A whole run: cluster, parts, the loop, evaluation, export, report; and everything down again whatever happens."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from megarl import config as configuration
from megarl.algorithms import advantage
from megarl.bridge.hf_config import read_config
from megarl.config import Config
from megarl.config.paths import user_path
from megarl.controller import checkpoint
from megarl.controller.baseline import GreedyBaseline, NoBaseline
from megarl.controller.checkpoint import Checkpoint
from megarl.controller.cluster import cluster
from megarl.controller.engines import EngineGroup
from megarl.controller.estimator import Estimator
from megarl.controller.evaluation import Evaluation
from megarl.controller.export import export_critic, export_hf
from megarl.controller.last_word import LastWord
from megarl.controller.phases import Phases
from megarl.controller.placement import Places, places_of
from megarl.controller.preflight import Prepared
from megarl.controller.role_checks import notes
from megarl.controller.roles import (
    Critic,
    Learner,
    NoCritic,
    NoReference,
    NoRewardModel,
    Reference,
    RewardModel,
)
from megarl.controller.rollout import Generated, GroupSelection, Replayed, Rollout
from megarl.controller.saving import Saving
from megarl.controller.selection import Bypassed, Scored, Selection, unequal
from megarl.controller.shaping import Shaping
from megarl.controller.sync import WeightSync, transport
from megarl.controller.trainer import Trainer
from megarl.controller.workers import WorkerGroup
from megarl.errors import RunError, UserError
from megarl.observe.files import writing
from megarl.observe.observer import Observer
from megarl.rewards import Rewarder


def run(cfg: Config, prepared: Prepared) -> int:
    """Train as the configuration says; the exit code. Raises RunError where the run cannot go on."""
    with LastWord(), _Signals() as signals:
        for restarts in range(cfg.run.max_restarts + 1):
            with ExitStack() as stack:
                observer = stack.enter_context(_observer(cfg, prepared))
                try:
                    _run(cfg, prepared, observer, stack, signals)
                    break
                except RunError as error:
                    if signals.asked:  # to end, which it has
                        said = f"told to end ({signals.asked}), it failed before it was saved: {error}"
                        raise KeyboardInterrupt(said) from error
                    newest = _newest(observer.folder.path)
                    if newest is None or restarts == cfg.run.max_restarts:
                        raise
                    again = f"{restarts + 1} of run.max_restarts={cfg.run.max_restarts}"
                    observer.note(f"the run failed and goes on from step {newest.step} ({again}): {error}")
                    prepared = replace(prepared, resume=newest)
                finally:
                    signals.hold()
            signals.listen()
    return 0


def _put_aside(folder: Path, step: int) -> None:
    aside = folder.with_name(f"{folder.name}.until-step-{step}")
    with writing(aside):
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)


def _newest(run: Path) -> Checkpoint | None:
    try:
        return checkpoint.newest(run)
    except UserError:  # the failure is what should be told
        return None


def _changes(cfg: Config, found: Checkpoint | None) -> Iterator[str]:
    """Settings that are not as they were."""
    if found is not None:
        for key, (old, new) in checkpoint.changed(found, cfg).items():
            yield f"{key} was {old!r} and is {new!r} from step {found.step + 1} on"


def _observer(cfg: Config, prepared: Prepared) -> Observer:
    resume = prepared.resume
    return Observer(cfg, configuration.dump(cfg), resumed=(resume.run, resume.step) if resume else None)


def _run(cfg: Config, prepared: Prepared, observer: Observer, stack: ExitStack, signals: _Signals) -> None:
    began = ["run.resume=auto: there is no unfinished run of this name with a checkpoint; this is a new one"]
    fresh = cfg.run.resume == "auto" and prepared.resume is None
    for note in (*prepared.sources.notes, *notes(cfg), *(began if fresh else ()), *_changes(cfg, prepared.resume)):
        observer.note(note)
    places: list[tuple[str, Path | str]] = []
    with observer.stage("start Ray"):
        try:
            stack.enter_context(cluster(cfg.cluster, observer.folder.path / "logs"))
            signals.listen()
        except SystemExit as error:  # what Ray's own handler makes of SIGTERM, which was in place until then
            raise KeyboardInterrupt from error
    trainer, evaluation, saving = _build(cfg, prepared, observer, stack)
    _loop(cfg, trainer, evaluation, saving, observer, signals)
    if cfg.export.hf:
        with observer.stage("export"):
            for name in ("model", "critic"):  # of a run that has gone on from its end
                if prepared.resume and (old := observer.folder.path / name).exists():
                    _put_aside(old, prepared.resume.step)
            places.append(("the model", export_hf(cfg, prepared, trainer.sync, observer.folder.path / "model")))
            if isinstance(trainer.critic, Critic):
                target = observer.folder.path / "critic"
                places.append(("the critic", export_critic(cfg, prepared, trainer.critic.group, target)))
    observer.finish(places)


def _build(cfg: Config, prepared: Prepared, observer: Observer, stack: ExitStack) -> tuple[Trainer, Evaluation, Saving]:
    """Start the engine and the ranks beside each other, go back to where a run that goes on was, and give the engine the trainer's
    weights."""
    r, places = cfg.rollout, places_of(cfg)
    if places.nodes:
        observer.note(places.nodes)
    engines = EngineGroup(
        cfg,
        prepared.folder,
        engines=r.engines,
        max_restarts=r.max_restarts,
        progress_timeout=r.progress_timeout,
        oversample=r.oversample,
        note=observer.note,
        places=places.engines,
    )
    stack.callback(engines.shutdown)
    groups = _groups(cfg, prepared, places)
    hosts = {role: groups[pool] for pool, roles in cfg.pools.items() for role in roles if role != "rollout"}
    actor = hosts["actor"]
    for group in groups.values():
        group.start()
    with observer.stage("start the trainer"):
        for group in groups.values():
            group.ready()
    with observer.stage("start the engine"):
        engines.ready()
        engines.release()  # until the first weights
    dtype = cfg.rollout.dtype or cfg.model.dtype
    transfer = transport(cfg, prepared.model, prepared.folder, observer.folder.path / "weights", observer.note)
    stack.callback(transfer.close)
    coarser = "bfloat16" if "bfloat16" in (dtype, cfg.model.dtype) else dtype
    probe = cfg.reshard.probe or bool(r.urls)  # whose weights cannot be read back
    sync = WeightSync(actor, engines, transfer, coarser, probe, cfg.reshard.probe_tolerance, prepared.model.dims.vocab)
    engines.renew = sync.renew
    rewards = Rewarder(cfg.reward, prepared.tokenizer)
    reward_model = RewardModel(hosts["reward_model"], cfg.reward_model) if cfg.reward_model else NoRewardModel()
    start = prepared.resume.step if prepared.resume else 0
    rollout = _rollout(cfg, prepared, engines, rewards, start)
    stack.callback(rollout.close)
    trainer = Trainer(
        prompts=prepared.sources.train,
        prompts_per_step=cfg.data.prompts_per_step,
        rollout=rollout,
        rewards=rewards if isinstance(rollout, Replayed) else Scored(),
        reward_model=reward_model,
        baseline=(
            GreedyBaseline(engines, rewards, reward_model, cfg.rollout)
            if "baseline_B" in advantage.required(cfg.algorithm.advantage)
            else NoBaseline()
        ),
        old_policy=Bypassed() if cfg.algorithm.correction.bypass else actor,
        reference=Reference(hosts["reference"]) if cfg.algorithm.reference else NoReference(),
        critic=Critic(hosts["critic"]) if cfg.critic else NoCritic(),
        actor=Learner(actor, cfg.critic.warmup_steps if cfg.critic else 0),
        shaping=Shaping(cfg.algorithm.shaping, cfg.rollout.max_new_tokens),
        estimator=Estimator(cfg.algorithm),
        selection=Selection(cfg.algorithm),
        sync=sync,
        stage=Phases(observer.stage, groups.values(), engines),
    )
    saving = Saving(cfg, trainer, hosts, observer)
    trainer.while_idle = saving.look
    if prepared.resume is not None:
        with observer.stage("read the checkpoint"):
            saving.restore(prepared.resume)
    with observer.stage("first weight sync"):
        sync.push(start)
    return trainer, Evaluation(prepared.sources.eval, engines, rewards, cfg), saving


def _groups(cfg: Config, prepared: Prepared, places: Places) -> dict[str, WorkerGroup]:
    """The ranks of each pool."""
    groups = {}
    for pool in cfg.layouts:
        models = prepared.models.only(*(role for role in cfg.pools[pool] if role != "rollout"))
        first = Path(getattr(models, pool))
        hidden = prepared.model.dims.hidden if pool == "actor" else int(read_config(first)["hidden_size"])
        groups[pool] = WorkerGroup(cfg, models, hidden, pool=pool, places=places.ranks[pool])
    return groups


def _rollout(cfg: Config, prepared: Prepared, engines: EngineGroup, rewards: Rewarder, start: int) -> Rollout:
    r = cfg.rollout
    if r.replay:
        return Replayed(user_path(r.replay))
    groups = GroupSelection(
        score=rewards.score,
        keep=unequal if r.keep_groups == "unequal" else None,
        more=prepared.sources.train.take,
        oversample=r.oversample,
        unfinished=r.unfinished,
        limit=r.filter_limit,
    )
    ends = {"stop": r.stop, "stop_token_ids": r.stop_token_ids}
    return Generated(engines, r, selection=groups, min_p=r.min_p, recorded=start, **ends)


def _loop(
    cfg: Config, trainer: Trainer, evaluation: Evaluation, saving: Saving, observer: Observer, signals: _Signals
) -> None:
    def evaluate(step: int) -> None:
        if evaluation.due(step):
            with observer.stage("evaluate"):
                metrics, batch = evaluation.run(step)
            observer.evaluated(step, metrics, batch)

    if saving.step == 0:
        evaluate(0)
    if cfg.checkpoint.every:
        signals.wait_for_the_step()
    for number in range(saving.step + 1, cfg.run.steps + 1):
        batch, metrics = trainer.step(number)
        with observer.stage("log"):
            observer.step(number, metrics, batch)
            for note in trainer.skipped(number, metrics):
                observer.note(note)
        evaluate(number)
        if signals.asked or saving.due(number):
            saving.save(number)
        if signals.asked:
            saving.finish()
            observer.note(f"told to end ({signals.asked}) after step {number}; run.resume=auto goes on from there")
            raise KeyboardInterrupt(f"told to end ({signals.asked}) after step {number}")
    saving.finish()


class _Signals:
    """SIGTERM, and SIGHUP of a terminal that is closed, end a run like Ctrl-C does: in order. While the run is taken down, which is
    soon done, all are held off until it would be started again. A run with checkpoints finishes its step first (`asked`); a second
    signal does not wait. A SIGHUP that is ignored (nohup) stays so."""

    _ENDING = (signal.SIGTERM, signal.SIGHUP)
    asked = ""  # the name of the signal that told the run to end after its step
    _held = False

    def __enter__(self) -> _Signals:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, *self._ENDING)}
        self._before = {n: handler for n, handler in before.items() if (n, handler) != (signal.SIGHUP, signal.SIG_IGN)}
        self.listen()
        return self

    def listen(self) -> None:
        """Raises KeyboardInterrupt where one came while they were held off."""
        for number in self._before:
            signal.signal(number, signal.default_int_handler)
        if self._held:
            raise KeyboardInterrupt

    def wait_for_the_step(self) -> None:
        ending = [number for number in self._ENDING if number in self._before]

        def note(number: int, _: object) -> None:
            self.asked = signal.Signals(number).name
            for each in ending:
                signal.signal(each, signal.default_int_handler)

        for number in ending:
            signal.signal(number, note)

    def hold(self) -> None:
        def note(*_: object) -> None:
            self._held = True

        for number in self._before:
            signal.signal(number, note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
