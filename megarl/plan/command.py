"""`megarl plan CONFIG`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megarl.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command. Imports nothing heavy."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file, e.g. configs/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings on top of the file")
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help="laptop, a100, h100, h200, b200, or a YAML file like theirs (default: cluster.hardware, else this machine)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, of every rank, in bytes")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build the real Megatron model of some ranks without memory, and compare what it holds",
    )
    parser.add_argument(
        "--rank",
        type=int,
        nargs="+",
        metavar="N",
        help="with --dry-run: the actor's ranks to build (default: first, last, fullest)",
    )
    parser.set_defaults(command=run, what="the configuration cannot be planned")


def run(args: argparse.Namespace) -> int:
    """0: it fits; 1: it does not, or the real model holds something else."""
    from megarl.config import read
    from megarl.controller.survey import Machines, survey
    from megarl.observe.files import write_whole
    from megarl.plan import hardware as machines
    from megarl.plan.links import traffic
    from megarl.plan.memory import Plan
    from megarl.plan.report import as_json, shown
    from megarl.plan.verdict import verdict

    if args.rank and not args.dry_run:
        raise UserError("--rank names ranks that --dry-run builds; add --dry-run")
    if args.json and not args.json.absolute().parent.is_dir():
        raise UserError(f"--json {args.json}: there is no folder {args.json.parent}")
    reading = read(args.config, args.overrides)
    named = args.hardware or (reading.config.cluster.hardware if reading.config else None)
    hardware = machines.find(named) if named else machines.here()
    asked = Machines(hardware.gpu, hardware.devices, hardware.name, hardware.compute_capability)
    plan = Plan(survey(reading, asked), hardware)
    sent, judged = traffic(plan), verdict(plan)
    print(shown(plan, sent, judged))
    facts = as_json(plan, sent, judged)
    equal = True
    if args.dry_run:
        from megarl.plan.dry_run import dry_run

        facts["dry_run"], equal = dry_run(plan, args.rank)
    if args.json:
        write_whole(args.json, json.dumps(facts, indent=1) + "\n")
    return 0 if judged.fits and equal else 1
