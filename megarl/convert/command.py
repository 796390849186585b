"""`megarl convert …` and the tools in tools/convert_ckpt/. What is heavy is imported by the command that needs it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
_CONFIG = (
    "the Hugging Face folder of the model that was trained, where a checkpoint has no config.json of its own or lacks layers for "
    "multi-token prediction"
)


def add_commands(parser: argparse.ArgumentParser) -> None:
    """The four commands under `megarl convert`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    to_megatron = commands.add_parser("hf-to-megatron", help="a Hugging Face folder into a torch_dist checkpoint")
    _conversion(to_megatron)
    to_megatron.set_defaults(command=_to_megatron, what="convert hf-to-megatron")

    to_hf = commands.add_parser(
        "megatron-to-hf", help="a torch_dist checkpoint, of any layout, into a Hugging Face folder"
    )
    _conversion(to_hf)
    to_hf.add_argument("--config", type=Path, metavar="DIR", help=_CONFIG)
    to_hf.set_defaults(command=_to_hf, what="convert megatron-to-hf")

    verify = commands.add_parser("verify", help="compare two models: names, shapes, dtypes, every byte")
    verify.add_argument("first", type=Path, metavar="A", help="a Hugging Face folder or a torch_dist checkpoint")
    verify.add_argument("second", type=Path, metavar="B", help="another")
    verify.add_argument("--config", type=Path, metavar="DIR", help=_CONFIG)
    verify.add_argument("--logits", action="store_true", help="compare what they answer too, in float32")
    verify.set_defaults(command=_verify, what="convert verify")

    inspect = commands.add_parser("inspect", help="say what a folder holds")
    inspect.add_argument("folder", type=Path, metavar="FOLDER", help="a Hugging Face folder or a torch_dist checkpoint")
    inspect.add_argument("--config", type=Path, metavar="DIR", help=_CONFIG)
    inspect.add_argument("--tensors", action="store_true", help="with a line for each tensor")
    inspect.set_defaults(command=_inspect, what="convert inspect")


_LAYOUT = re.compile(r"--(.*parallel|(.*-)?(tp|pp|ep|cp|etp|vpp)\b)")  # as other tools name it
NO_LAYOUT = "a torch_dist checkpoint is loaded in any layout, so none is given"


def unknown(arguments: Sequence[str]) -> str:
    """What to say of arguments that a conversion does not know."""
    hint = f" ({NO_LAYOUT})" if any(map(_LAYOUT.match, arguments)) else ""
    return f"unrecognized arguments: {' '.join(arguments)}{hint}"


def _conversion(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(unknown=unknown)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="what is read")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the folder to make; it is never overwritten")
    parser.add_argument("--dtype", choices=DTYPES, help="of the target (default: every tensor keeps its own)")
    parser.add_argument("--shard-gb", type=float, default=2.0, metavar="GB", help="size of a file (default: 2)")
    parser.add_argument(
        "--allow-nonfinite", action="store_true", help="carry NaN and infinity over instead of refusing"
    )
    parser.add_argument(
        "--sync", action="store_true", help="wait until the target is on the disk before it gets its name"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _options(args: argparse.Namespace) -> Any:
    import torch

    from megarl.convert.work import Options
    from megarl.errors import UserError

    if not 0 < args.shard_gb <= 1e6:
        raise UserError(f"--shard-gb is {args.shard_gb:g}; it must be above 0 and at most a million.")
    return Options(
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        shard_bytes=max(1, int(args.shard_gb * 1e9)),
        allow_nonfinite=args.allow_nonfinite,
        durable=args.sync,
    )


def _to_megatron(args: argparse.Namespace) -> int:
    from megarl.convert.hf_to_megatron import hf_to_megatron
    from megarl.convert.processes import processes

    with processes() as among:
        hf_to_megatron(args.source, args.target, _options(args), among, show=not args.quiet)
        if among.first:
            print(args.target)
    return 0


def _to_hf(args: argparse.Namespace) -> int:
    from megarl.convert.megatron_to_hf import megatron_to_hf
    from megarl.convert.processes import processes

    with processes() as among:
        megatron_to_hf(args.source, args.target, _options(args), among, config=args.config, show=not args.quiet)
        if among.first:
            print(args.target)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from megarl.convert.source import open_source
    from megarl.convert.verify import compare

    _demand_one("verify")
    first, second = open_source(args.first, args.config), open_source(args.second, args.config)
    result = compare(first, second)
    if args.logits:
        from megarl.convert.logits import compare_logits

        worst, problems = compare_logits(first, second)
        result.differences += problems
        print(f"logits: at most {worst:.1e} of the largest apart")
    for note in result.notes:
        print(f"note: {note}")
    for difference in result.differences:
        print(f"differs: {difference}")
    if result.differences:
        count = len(result.differences)
        print(f"{count} difference{'s' if count != 1 else ''} between {args.first} and {args.second}")
        return 1
    print(f"equal: {result.tensors} tensors, {result.bytes / 1e9:.3f} GB, every byte")
    return 0


def _demand_one(what: str) -> None:
    from megarl.convert.processes import processes
    from megarl.errors import UserError

    with processes() as among:
        if among.world > 1:
            raise UserError(f"{what} is for one process; start it without torchrun.")


def _inspect(args: argparse.Namespace) -> int:
    from megarl.convert.inspect import inspect

    _demand_one("inspect")
    print("\n".join(inspect(args.folder, args.config, tensors=args.tensors)))
    return 0
