"""The `megarl` command. Heavy parts are imported by the command that needs them, so that help and errors come at once.

Exit codes: 0 done; 1 the run failed (RunError) or a bug; 2 the input is wrong (UserError); 130 interrupted; 141 who read the output
has gone (`megarl … | head`), which ends it without a word.
"""

from __future__ import annotations

import argparse
import errno
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, Any

from megarl import __version__
from megarl.convert import command as convert
from megarl.errors import ConfigError, RunError, UserError
from megarl.plan import command as plan


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and answers its exit code. A wrong command line ends in argparse's own SystemExit(2)."""
    try:
        try:
            if sys.stdout is None:  # it is where the shell has closed it
                return _run(argv)
            with redirect_stdout(_Output(sys.stdout)):
                return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # else Python does, at its end, and tells of what goes wrong in its own words
    except OSError as error:  # of the output: all others are told by `guarded`
        for stream in (stream for stream in (sys.stdout, sys.stderr) if stream is not None and _is_gone(stream)):
            _silence(stream)  # for what Python has still to write
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        _silence(sys.stdout)
        _complain(f"the output could not be written: {error.strerror or error}.")
        return 1


class _Output:
    """A stream that keeps the error of a write that failed, so that it is not taken for another file's.

    A terminal that has been closed is no failure: what goes on without one, or has to save first, goes on unseen."""

    def __init__(self, stream: Any):
        self._stream = stream
        self._terminal = stream.isatty()
        self.fault: OSError | None = None

    def write(self, text: str) -> Any:
        with self._heard():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._heard():
            self._stream.flush()

    @contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._terminal and error.errno == errno.EIO:
                _silence(self._stream)
                return
            self.fault = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _run(argv: Sequence[str] | None) -> int:
    # Read by torch when it first allocates: large tensors get huge pages, of which the kernel has 512 times fewer to clear.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    parser = _parser()
    args, later = parser.parse_known_args(argv)
    if later and (not hasattr(args, "overrides") or any(text.startswith("-") for text in later)):
        said = args.unknown(later) if hasattr(args, "unknown") else f"unrecognized arguments: {' '.join(later)}"
        parser.error(said)
    if later:  # settings that stand behind options
        args.overrides += later
    return guarded(args.what, lambda: args.command(args))


def guarded(what: str, command: Callable[[], int]) -> int:
    """The exit code of a command; errors for the user are printed without a traceback. `what` heads a list."""
    try:
        return command()
    except ConfigError as error:
        count = len(error.problems)
        _complain(f"{what}: {count} problem{'s' if count != 1 else ''}")
        for problem in error.problems:
            _say(f"  - {problem}")
        return 2
    except UserError as error:
        _complain(str(error))
        return 2
    except RunError as error:
        _complain(str(error))
        return 1
    except KeyboardInterrupt as error:
        _complain(f"interrupted: {error}" if str(error) else "interrupted")
        return 130
    except Exception as error:  # nothing may end without a word to the user
        if isinstance(error, BrokenPipeError) and any(map(_is_gone, (sys.stdout, sys.stderr))):
            raise
        if error is getattr(sys.stdout, "fault", None):
            raise
        traceback.print_exc()
        _complain(f"this is a bug in megarl {__version__}; please report it with the lines above")
        return 1


def _silence(stream: Any) -> None:
    """What it has not written yet, and all that comes, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _is_gone(stream: IO[str] | None) -> bool:
    """Whether nobody can read any more what is written."""
    try:
        poll = select.poll()
        poll.register(stream.fileno() if stream is not None else -1, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # no file of the system's
        return False


def _complain(text: str) -> None:
    _say(f"megarl: {text}")


def _say(line: str) -> None:
    """On stderr. Where that takes nothing, or the shell has closed it, the exit code alone has to tell."""
    if sys.stderr is None:  # for which `print` would take stdout
        return
    try:
        print(line, file=sys.stderr)
    except BrokenPipeError:
        raise
    except OSError:
        pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl", description="Reinforcement learning for language models on Megatron-core, SGLang and Ray."
    )
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a model as a configuration file says")
    train.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file, e.g. configs/demo.yaml")
    train.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="settings on top of the file, e.g. rollout.n=4 run.steps=10"
    )
    train.set_defaults(command=_train, what="the configuration cannot run")

    plan.add_arguments(
        commands.add_parser("plan", help="say what a configuration needs on some machines, without starting anything")
    )

    doctor = commands.add_parser("doctor", help="say what this machine has and what is used in place of what it lacks")
    doctor.set_defaults(command=_doctor, what="doctor")

    models = commands.add_parser("models", help="get or make model folders").add_subparsers(
        required=True, metavar="COMMAND"
    )
    listed = models.add_parser("list", help="the models that can be named in place of a folder")
    listed.set_defaults(command=_models_list, what="models list")
    get = models.add_parser("get", help="build a model folder in the cache, once, and print its path")
    get.add_argument("name", metavar="NAME", help="a name of `megarl models list`, e.g. smollm2")
    get.set_defaults(command=_models_get, what="models get")
    tiny = models.add_parser("make-tiny", help="make a tiny random model with a small real tokenizer, for tests")
    tiny.add_argument("family", metavar="FAMILY", help="as `megarl models list` names it behind tiny-, e.g. qwen3")
    tiny.add_argument("--out", type=Path, metavar="DIR", help="the folder to make (default: ./tiny-FAMILY)")
    tiny.add_argument("--seed", type=int, default=0, help="of the random weights (default: 0)")
    tiny.set_defaults(command=_models_make_tiny, what="models make-tiny")

    convert.add_commands(
        commands.add_parser("convert", help="convert and compare checkpoints of Hugging Face and Megatron")
    )
    return parser


def _train(args: argparse.Namespace) -> int:
    from megarl.controller.preflight import preflight_file

    # A console script does not look into the folder it is run in, where a user's own rewards and estimators lie.
    sys.path.append(os.getcwd())
    with _heard():
        cfg, prepared = preflight_file(args.config, args.overrides)
        from megarl.controller.train import run  # imports Ray: only once nothing is left to complain about

    return run(cfg, prepared)


@contextmanager
def _heard() -> Iterator[None]:
    """Ctrl-C, which the import of some libraries swallows, counts at the end of the block at the latest."""
    came: list[int] = []

    def note(number: int, _: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _doctor(args: argparse.Namespace) -> int:
    from megarl.doctor import report

    print(report())
    return 0


def _models_list(args: argparse.Namespace) -> int:
    from megarl import models

    print("\n".join(models.names()))
    return 0


def _models_get(args: argparse.Namespace) -> int:
    from megarl import models

    print(models.resolve(args.name))
    return 0


def _models_make_tiny(args: argparse.Namespace) -> int:
    from megarl.models.tiny import make_tiny

    folder = args.out or Path(f"tiny-{args.family}")
    make_tiny(args.family, folder, seed=args.seed)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
