"""What SGLang's engine is started with: megarl's own arguments, and those of a user, which are checked against SGLang's own record.

`asked` is for a process that must not import SGLang: `python -m megarl.rollout.arguments` reads arguments as JSON from its standard
input, and writes what is wrong with them as JSON to its standard output.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megarl.bridge import fp8
from megarl.bridge.quantised import FIELD
from megarl.config.loading import describe
from megarl.cpu import has_cuda

# What a machine without CUDA needs, and what was measured to be best there.
_ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",  # replaced by megarl.cpu.attention, which is registered under this name
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "max_total_tokens": 16384,
    "max_running_requests": 256,
}
# SGLang's deterministic inference is kernels for CUDA. A sum's last bit depends on the shape of the product that it is part of, so on
# a CPU one response is sampled at a time, and its prompt is read whole, whatever was read before.
_ALONE: dict[str, Any] = {"max_running_requests": 1, "disable_radix_cache": True}
_WITHIN = 300.0  # seconds that SGLang may take to be imported, from a disk that is slow


@dataclass(frozen=True)
class EngineSettings:
    """See `megarl.rollout.engine.Engine`."""

    model_path: str
    dtype: str
    seed: int
    max_total_tokens: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    releases: bool = False
    deterministic: bool = False
    quantised: bool = False  # linear layers in float8, see `megarl.bridge.fp8`

    @property
    def ranks(self) -> int:
        """Processes of the engine that hold weights."""
        return int(self.extra.get("tp_size", 1))


def arguments(settings: EngineSettings) -> dict[str, Any]:
    """SGLang's: ours, then the CPU's where there is no CUDA, then `extra`."""
    from megarl.rollout.loader import FORMAT

    ours: dict[str, Any] = {
        "model_path": settings.model_path,
        "dtype": settings.dtype,
        "random_seed": settings.seed,
        "skip_tokenizer_init": True,
        "custom_weight_loader": [FORMAT],
        "disable_shared_experts_fusion": True,  # else they are under other names than the checkpoint's
        "sleep_on_idle": True,  # else an idle engine keeps a core busy with polling
        "weight_version": "0",
        "log_level": "error",
    }
    if not has_cuda():
        ours |= _ON_CPU
    elif settings.releases:
        ours["enable_memory_saver"] = True
    if settings.deterministic:
        ours |= {"enable_deterministic_inference": True} if has_cuda() else _ALONE
    if settings.quantised:
        ours["json_model_override_args"] = json.dumps({FIELD: fp8.CONFIG})  # as if config.json said so
    if settings.max_total_tokens is not None:
        ours["max_total_tokens"] = settings.max_total_tokens
    return ours | settings.extra


def problems(extra: Mapping[str, Any]) -> list[str]:
    """One sentence for each argument that SGLang does not have, or not with such a value. Imports SGLang."""
    return list(_problems(extra))


def _problems(extra: Mapping[str, Any]) -> Iterator[str]:
    import msgspec
    import sglang
    from sglang.srt.server_args import ServerArgs

    version = f"SGLang {sglang.__version__}"
    hints = typing.get_type_hints(ServerArgs, include_extras=True)
    known = {field.name: _Argument.of(hints[field.name]) for field in msgspec.structs.fields(ServerArgs)}
    names = {alias: name for name, argument in known.items() for alias in (name, *argument.aliases)}
    for name, value in extra.items():
        if name not in known:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; the nearest that it has is {names[near[0]]}" if near else ""
            yield f"{version} has no engine argument {name}{hint}"
        elif wanted := known[name].lacking(value):
            yield f"{version}'s engine argument {name} is {value!r}; {wanted}"


@dataclass(frozen=True)
class _Argument:
    kind: Any  # its type
    aliases: tuple[str, ...]  # other names, on SGLang's command line
    choices: tuple[Any, ...]  # no others are allowed; empty: all are

    @classmethod
    def of(cls, hint: Any) -> _Argument:
        kind, *notes = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        aliases = [alias for note in notes for alias in getattr(note, "aliases", None) or ()]
        literals = [inner for inner in (kind, *typing.get_args(kind)) if typing.get_origin(inner) is typing.Literal]
        choices = [choice for inner in literals for choice in typing.get_args(inner)]
        choices = choices or [choice for note in notes for choice in getattr(note, "choices", None) or ()]
        return cls(kind, tuple(alias.lstrip("-").replace("-", "_") for alias in aliases), tuple(choices))

    def lacking(self, value: Any) -> str:
        """What a value would have to be; empty where it may be."""
        import msgspec

        for one in (value if isinstance(value, list) else [value]) if self.choices and value is not None else ():
            if one not in self.choices:
                near = difflib.get_close_matches(str(one), map(str, self.choices), n=1)
                return (
                    f"the nearest that it may be is {near[0]}" if near else f"it must be one of {_listed(self.choices)}"
                )
        try:
            msgspec.convert(value, self.kind)
        except msgspec.ValidationError:
            return f"it must be {describe(self.kind)}"
        except TypeError:  # msgspec does not know this kind
            pass
        return ""


def _listed(choices: Iterable[Any]) -> str:
    return ", ".join("null" if choice is None else str(choice) for choice in choices)


def asked(extra: Mapping[str, Any]) -> list[str]:
    """`problems` without importing SGLang: another process does, which takes some seconds. Nothing where SGLang is not installed."""
    if not extra or find_spec("sglang") is None:
        return []
    root = str(Path(__file__).parents[2])  # so that the package is found there as it was found here
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "megarl.rollout.arguments"],
            input=json.dumps(dict(extra), default=str),
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=_WITHIN,
        )
    except subprocess.TimeoutExpired:
        return [f"SGLang was not imported within {_WITHIN:.0f} s, so that its arguments cannot be checked"]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [f"SGLang cannot be imported, so that its arguments cannot be checked: {last}"]
    return list(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    from megarl.rollout.host import prepare_imports

    prepare_imports()
    found = problems(json.load(sys.stdin))
    print()  # SGLang may have printed something
    print(json.dumps(found))
