"""The Ray cluster of a run: joined, or started here and taken down again whatever happens."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megarl.config.schema import ClusterConfig
from megarl.errors import RunError


def environment() -> dict[str, str]:
    """What Ray's processes must find in their environment."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # an actor without GPUs must not lose sight of CPU-only settings
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        # Ray's 15 would let anything else on the machine starve a run
        "RAY_worker_niceness": os.environ.get("RAY_worker_niceness", "0"),  # noqa: SIM112 Ray's own spelling
    }


@contextmanager
def cluster(settings: ClusterConfig, logs: Path) -> Iterator[None]:
    """A running Ray for the block. After a failure the logs of Ray's processes are kept in `logs`."""
    os.environ.update(environment())
    if settings.port is not None:
        os.environ["RAY_GCS_SERVER_PORT"] = str(settings.port)
    import ray
    from ray._private import worker

    worker.print_to_stdstream = lambda *_, **__: None  # a paragraph on each death, for which `calls` has one sentence
    logging.getLogger("ray").setLevel(logging.ERROR)  # its greeting belongs to nobody's run
    # Unix sockets live below this folder and their paths may not exceed 107 characters, hence not the run folder.
    scratch = None
    if settings.address is None:
        _remove_stale(Path("/tmp"))
        scratch = Path(tempfile.mkdtemp(prefix=f"megarl-ray-{os.getpid()}-", dir="/tmp"))
    before = os.environ.get("TMPDIR")
    try:
        if scratch is not None:
            os.environ["TMPDIR"] = str(scratch)  # what Ray's processes leave behind goes with it, however they ended
        with _deaf_to_hangups():
            _start(ray, settings, scratch)
        _wait_for_nodes(ray, settings)
        yield
    except BaseException:
        if scratch is not None:
            with suppress(OSError):  # on a full disk the error that says so must not be lost for the logs
                _keep_logs(scratch, logs)
        raise
    finally:
        ray.shutdown()
        if scratch is not None:
            _restore("TMPDIR", before)
            _remove(scratch)


@contextmanager
def _deaf_to_hangups() -> Iterator[None]:
    """A terminal that is closed tells all that were started on it. What is started here is the command's to end, once it has saved: it
    never hears of it, as of Ctrl-C; the command does, when the block is left."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _remove_stale(folder: Path) -> None:
    """What runs left that had no time to clean up, killed with -9."""
    for path in folder.glob("megarl-ray-*"):
        owner = re.match(r"megarl-ray-(\d+)-", path.name)
        if owner and not Path(f"/proc/{owner.group(1)}").exists():
            _remove(path)


def _remove(folder: Path) -> None:
    """Again while processes that are just ending still write there, for a second at most."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _start(ray: Any, settings: ClusterConfig, scratch: Path | None) -> None:
    common: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    try:
        if scratch is None:
            ray.init(address=settings.address, **common)
        else:
            with _patient(settings.worker_timeout):
                ray.init(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=settings.object_store_mb << 20,
                    _temp_dir=str(scratch),
                    **common,
                )
    except Exception as error:
        where = f"at {settings.address}" if scratch is None else "on this machine"
        port = f" (is port {settings.port} free?)" if scratch is not None and settings.port else ""
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if scratch is None and os.environ.get("RAY_AUTH_MODE") != "token":
            first += " (one that asks for a token wants RAY_AUTH_MODE=token and RAY_AUTH_TOKEN in the environment)"
        raise RunError(
            f"Ray could not be {'joined' if scratch is None else 'started'} {where}{port}: {first}"
        ) from error


@contextmanager
def _patient(seconds: float) -> Iterator[None]:
    """Ray gives a node that it starts half a minute to be known, which a busy machine may not keep, and has no setting for it. Nor has
    the node for its agents, and it ends where these take longer: then there is nothing to wait for."""
    from ray._private import services

    ask, start = services.get_node, services.start_raylet
    end = time.monotonic() + seconds
    nodes: list[Any] = []

    def start_node(*of: Any, **named: Any) -> Any:
        nodes.append(start(*of, **named))
        return nodes[-1]

    def wait_for_node(*of: Any) -> Any:
        while True:
            try:
                return ask(*of)
            except RuntimeError:
                if any(node.process.poll() is not None for node in nodes):
                    raise RunError(
                        "its raylet died while it started, as it does on a machine that is too busy"
                    ) from None
                if time.monotonic() > end:
                    raise
            time.sleep(0.2)

    services.get_node, services.start_raylet = wait_for_node, start_node
    try:
        yield
    finally:
        services.get_node, services.start_raylet = ask, start


def _wait_for_nodes(ray: Any, settings: ClusterConfig) -> None:
    """Of a cluster that is joined, machines may come later than the run. RunError where they do not come in time."""
    end = time.monotonic() + settings.worker_timeout
    while (there := sum(node["Alive"] for node in ray.nodes())) < (settings.nodes or 1):
        if time.monotonic() > end:
            raise RunError(
                f"{there} of cluster.nodes={settings.nodes} machines joined the Ray cluster at {settings.address} within "
                f"{settings.worker_timeout:.0f} s"
            )
        time.sleep(0.5)


def _keep_logs(scratch: Path, logs: Path) -> None:
    """What the workers printed is the only witness of a crash. Files without content are left out."""
    for source in scratch.glob("session_2*/logs/*"):
        if source.is_file() and source.stat().st_size and source.name.startswith(("worker-", "raylet.", "gcs_server.")):
            logs.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, logs / source.name)
