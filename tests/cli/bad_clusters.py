"""Bad inputs of `megarl train` that are about where and under which name it runs; and how a case is written."""

from __future__ import annotations

from typing import NamedTuple


class Bad(NamedTuple):
    """Overrides, and for each problem that must be listed a piece of its sentence. `{root}` is the test's folder."""

    overrides: tuple[str, ...]
    said: tuple[str, ...]


def bad(*overrides: str, said: str | tuple[str, ...]) -> Bad:
    return Bad(overrides, (said,) if isinstance(said, str) else said)


CLUSTER = {
    "a taken port": bad("cluster.port={port}", said="cluster.port={port} is taken by another program"),
    "a port and an address": bad("cluster.port=65000", "cluster.address=auto", said="remove one of them"),
    "a name that a shell takes for an option": bad("run.name=-x", said="begins with none of - . ~"),
    "a name that a shell spells out": bad("run.name=a*b", said="run.name='a*b' would be another thing in a shell"),
    "a name that ends in a space": bad("run.name='a '", said="has no space at its ends"),
    "an address without a port": bad(
        "cluster.address=''", said="cluster.address='' must be HOST:PORT of a Ray cluster"
    ),
    "an address of two words": bad("cluster.address='a b:1'", said="cluster.address='a b:1' must be HOST:PORT"),
    "Ray's client": bad("cluster.address=ray://head:10001", said="through Ray's client no run can be driven"),
    "no such interface": bad("cluster.interface=nope0", said="cluster.interface=nope0: this machine has lo"),
    "no interface": bad("cluster.interface=''", said="cluster.interface='' must be the name of a network interface"),
    "a store larger than memory": bad("cluster.object_store_mb=99999999", said="MiB of memory; set it lower"),
    "no time": bad("cluster.worker_timeout=1e-9", said="cluster.worker_timeout is 1e-09; it must be at least 1"),
}
