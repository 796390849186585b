"""A run on several machines, started by torchrun on each of them:

    torchrun --nnodes N --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m megarl.launch train CONFIG [KEY=VALUE ...]

torchrun's processes find each other; each starts Ray's node on its machine. The first is Ray's head and runs `megarl train`, which
waits for all nodes (`cluster.nodes`); the others stay until it has ended. All end with its exit code, and take their Ray down.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from megarl import cli
from megarl.controller.cluster import environment
from megarl.roles.ports import unused_port

_TORCHRUN = ("TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")
# The `ray` command, which Linux tells to end (PR_SET_PDEATHSIG) when the launcher has died, of kill -9 too.
_RAY = (
    "import ctypes, runpy, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "runpy.run_module('ray.scripts.scripts', run_name='__main__', alter_sys=True)"
)
_LOOK = 0.5  # seconds between two looks at what others said
_PATIENCE = 60.0  # seconds that a node of Ray may take to answer, and that others may take to hear of the end


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the run, on every machine."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    problem = _problem(os.environ, arguments)
    if problem:
        print(f"megarl: {problem}", file=sys.stderr)
        return 2
    from torch.distributed import rendezvous

    master = os.environ["MASTER_ADDR"]
    store, rank, world = next(iter(rendezvous("env://", timeout=timedelta(seconds=600))))
    # The trainer's ranks, which inherit what is left, are other processes with numbers of their own.
    for name in [name for name in os.environ if name.startswith(_TORCHRUN)]:
        del os.environ[name]
    return _lead(store, world, master, arguments) if rank == 0 else _follow(store, rank)


def _problem(given: Mapping[str, str], arguments: Sequence[str]) -> str | None:
    if not arguments or arguments[0] != "train":
        return "megarl.launch starts `train CONFIG [KEY=VALUE ...]`, as the megarl command takes it"
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in given]:
        return f"megarl.launch is started by torchrun, and {missing[0]} is not set: torchrun --nnodes N -m megarl.launch train …"
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "MEGARL_NODE_CPUS", "MEGARL_NODE_OBJECT_STORE_MB"):
        if not given.get(name, "1").isdigit():
            return f"{name}={given[name]} in the environment must be a whole number"
    if (count := given.get("LOCAL_WORLD_SIZE", "1")) != "1":
        return (
            f"torchrun --nproc-per-node {count}: one process a machine starts everything on it; set --nproc-per-node 1"
        )
    return None


def _lead(store: Any, world: int, master: str, arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the run has its own way to end
    code = 1
    try:
        address = socket.gethostbyname(master)
        port = unused_port()
        _know(token := secrets.token_hex(32))
        head = ["--head", f"--port={port}", f"--node-ip-address={address}", "--include-dashboard=false"]
        with _ray(head) as node:
            _until(lambda: _listens(address, port), node, "Ray's head did not start")
            store.set("token", token)
            store.set("head", f"{address}:{port}")
            code = cli.main([*arguments, f"cluster.address={address}:{port}", f"cluster.nodes={world}"])
    except SystemExit as error:  # argparse has said what is wrong, or `_until` says it here
        code = error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:  # before the run, which tells its own
        print("megarl: interrupted", file=sys.stderr)
        code = 130
    finally:
        store.set("exit", str(code))
        end = time.monotonic() + _PATIENCE  # the store may be in this process, and goes with it
        while time.monotonic() < end and not all(store.check([f"seen/{rank}"]) for rank in range(1, world)):
            time.sleep(_LOOK)
    return code


def _follow(store: Any, rank: int) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):  # the first decides: it may want to save before all end
        signal.signal(number, signal.SIG_IGN)
    try:
        while not store.check(["head"]):
            if store.check(["exit"]):
                break
            time.sleep(_LOOK)
        else:
            head = store.get("head").decode()
            _know(store.get("token").decode())
            own = f"--node-ip-address={_address_towards(head.rpartition(':')[0])}"
            with _ray([f"--address={head}", own]) as node:
                while not store.check(["exit"]):
                    if node.poll() is not None:
                        print(f"megarl: Ray's node of rank {rank} ended before the run did", file=sys.stderr)
                        return 1
                    time.sleep(_LOOK)
        code = int(store.get("exit"))
        store.set(f"seen/{rank}", "1")
        return code
    except RuntimeError as error:  # of the store: its process is gone
        print(f"megarl: rank 0 is gone, and with it the run ({str(error).splitlines()[0]})", file=sys.stderr)
        return 1


def _know(token: str) -> None:
    """Only who has the token may join this Ray or talk to it: its own processes, and those that they start."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


@contextmanager
def _ray(options: list[str]) -> Iterator[subprocess.Popen]:
    """A node of Ray on this machine for the block, in a process group of its own."""
    scratch = Path(tempfile.mkdtemp(prefix=f"megarl-ray-{os.getpid()}-", dir="/tmp"))  # short: sockets lie in it
    command = [sys.executable, "-c", _RAY, "start", *options, "--block", "--disable-usage-stats"]
    if "--head" in options:
        command.append(f"--temp-dir={scratch}")  # which other nodes take over
    if "MEGARL_NODE_CPUS" in os.environ:
        command.append(f"--num-cpus={os.environ['MEGARL_NODE_CPUS']}")
    if "MEGARL_NODE_OBJECT_STORE_MB" in os.environ:
        command.append(f"--object-store-memory={int(os.environ['MEGARL_NODE_OBJECT_STORE_MB']) << 20}")
    log = (scratch / "node.log").open("wb")
    node = subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **environment()},
    )
    try:
        yield node
    finally:
        if node.poll() is not None:
            sys.stderr.write((scratch / "node.log").read_text(errors="replace")[-2000:])
        for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            with suppress(ProcessLookupError):
                os.killpg(node.pid, number)
            with suppress(subprocess.TimeoutExpired):
                node.wait(patience)
        log.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _until(condition: Any, node: subprocess.Popen, what: str) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        if node.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"megarl: {what}")
        time.sleep(_LOOK)


def _address_towards(other: str) -> str:
    """Of this machine, on the way to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect((other, 9))
        return str(probe.getsockname()[0])


def _listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((address, port)) == 0


if __name__ == "__main__":
    sys.exit(main())
