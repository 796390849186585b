"""What a machine is: a small YAML file of facts, one of ours by its name or anybody's by its path; or the machine this runs on."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.errors import UserError

FOLDER = Path(__file__).parent / "hardware"
GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """A kind of node. Speeds are one way, of one device."""

    name: str
    gpu: bool  # each rank has a device with memory of its own; else all of a node share the node's
    devices: int  # of a node: GPUs, or cores
    memory_gib: float  # of a device; without GPUs of the node
    host_memory_gib: float  # of the node
    bf16_tflops: float  # of a device
    inside_gb_s: float  # between devices of a node
    between_gb_s: float  # between nodes
    host_gb_s: float  # between a device and its node's memory
    reserved_gib: float = 0.0  # of memory_gib, for what nobody here counts
    process_gib: float = 0.0  # without GPUs: of each process, before it holds anything
    compute_capability: tuple[int, int] | None = None

    @property
    def usable(self) -> int:
        """Bytes of a device, or without GPUs of the node, that can be filled."""
        return round((self.memory_gib - self.reserved_gib) * GIB)


def names() -> list[str]:
    """Of the files that come with megarl."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name: str) -> Hardware:
    """By one of `names()`, or by the path of a file. UserError where there is none, or it is not understood."""
    path = FOLDER / f"{name.lower()}.yaml" if name.lower() in names() else Path(name).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(name.lower(), names(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"there is no hardware {name!r}, nor a file of that name: {', '.join(names())} are known{hint}")
    try:
        facts = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())[:200]}") from error
    return _checked(path, facts)


def here() -> Hardware:
    """This machine: its GPUs by what CUDA says, their links as those of the named hardware that is most like them."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    if not torch.cuda.is_available():
        laptop = find("laptop")
        cores = len(os.sched_getaffinity(0))
        return dataclasses.replace(
            laptop, name="this machine", devices=cores, memory_gib=memory, host_memory_gib=memory
        )
    properties = torch.cuda.get_device_properties(0)
    known = [find(name) for name in names() if find(name).gpu]
    like = next((one for one in known if one.name in properties.name), find("a100"))
    return dataclasses.replace(
        like,
        name=f"this machine ({properties.name})",
        devices=torch.cuda.device_count(),
        memory_gib=properties.total_memory / GIB,
        host_memory_gib=memory,
        compute_capability=torch.cuda.get_device_capability(0),
    )


def _checked(path: Path, facts: Any) -> Hardware:
    """Every field there, of its kind and positive, and none that nobody reads."""
    fields = {field.name: field for field in dataclasses.fields(Hardware)}
    if not isinstance(facts, dict):
        raise UserError(f"{path} must be a list of `name: value` lines, as in {FOLDER / 'h100.yaml'}")
    if unknown := [str(key) for key in facts if key not in fields]:
        near = difflib.get_close_matches(unknown[0], fields, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; it must be one of {', '.join(fields)}"
        raise UserError(f"{path}: unknown key {unknown[0]}{hint}")
    if missing := [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in facts]:
        raise UserError(f"{path} lacks {', '.join(missing)}")
    for name, value in facts.items():
        kind = fields[name].type
        good = {
            "str": isinstance(value, str),
            "bool": isinstance(value, bool),
            "int": type(value) is int and value > 0,
            "float": type(value) in (int, float) and 0 <= value < float("inf"),
        }.get(str(kind), isinstance(value, list) and len(value) == 2 and all(type(v) is int for v in value))
        if not good or (
            name in ("memory_gib", "bf16_tflops", "inside_gb_s", "between_gb_s", "host_gb_s") and not value
        ):
            raise UserError(f"{path}: {name}={value!r} is not what is asked for there (see {FOLDER / 'h100.yaml'})")
    if "compute_capability" in facts:
        facts["compute_capability"] = tuple(facts["compute_capability"])
    hardware = Hardware(**facts)
    if hardware.usable <= 0:
        raise UserError(
            f"{path}: reserved_gib={hardware.reserved_gib:g} leaves nothing of memory_gib={hardware.memory_gib:g}"
        )
    return hardware
