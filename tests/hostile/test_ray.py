"""A local Ray: only this machine reaches it; its processes may be killed."""

import glob
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import ray

from pliant.experiments.engines import RayEngine
from pliant.experiments.run import execute
from pliant.experiments.run_config import RunConfig
from pliant.experiments.scheduler import run_all
from tests.experiments.helpers import descendants, outputs, small, write_waiting_network
from tests.experiments.test_scheduler import Notebook

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def listening(pid: int) -> dict[str, str]:
    """The addresses, in the kernel's hexadecimal form, that a process and its descendants listen on."""
    found = {}
    sockets = set()
    for process in {pid} | descendants(pid):
        for name in glob.glob(f"/proc/{process}/fd/*"):
            try:
                sockets.add(os.readlink(name).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:  # LISTEN
                address, port = fields[1].split(":")
                found[port] = address
    return found


@pytest.fixture
def engine() -> Iterator[RayEngine]:
    engine = RayEngine()
    yield engine
    engine.close()


@pytest.mark.long
def test_a_local_ray_listens_on_the_loopback_alone(tmp_path: Path, engine: RayEngine) -> None:
    assert run_all([small()], tmp_path, engine, Notebook()) == {small().id: "finished"}
    addresses = listening(os.getpid())
    assert len(addresses) >= 4
    assert set(addresses.values()) <= LOOPBACK


@pytest.mark.long  # A refused client asks again for a while.
def test_a_stranger_without_the_token_is_refused(tmp_path: Path, engine: RayEngine) -> None:
    assert run_all([small()], tmp_path, engine, Notebook()) == {small().id: "finished"}
    script = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
    stranger = subprocess.run(
        [sys.executable, "-c", script, ray.get_runtime_context().gcs_address],
        env=os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert stranger.returncode != 0
    assert "AuthenticationError" in stranger.stderr


@pytest.mark.long
def test_a_killed_raylet_ends_the_command_and_the_next_one_resumes(tmp_path: Path, engine: RayEngine) -> None:
    """A local Ray has one raylet: without it nothing can run. What was saved is used by the next command."""
    configs = [small(seed=seed, model=write_waiting_network(tmp_path, step=45)) for seed in range(2)]

    class Killer(Notebook):
        killed = False

        def tick(self, active: Iterable[RunConfig]) -> None:
            if not self.killed and list(tmp_path.glob("*.waits")):
                self.killed = True
                for process in descendants(os.getpid()):
                    command = Path(f"/proc/{process}/cmdline")
                    if command.exists() and b"raylet/raylet" in command.read_bytes().split(b"\0")[0]:
                        os.kill(process, signal.SIGKILL)
                (tmp_path / "go").touch()

    root = tmp_path / "runs"
    killer = Killer()
    statuses = run_all(configs, root, engine, killer, checkpoint_seconds=0)
    assert killer.killed
    assert set(statuses.values()) <= {"finished", "failed"}
    engine.close()
    for config in configs:
        assert execute(config, root).status == "finished"
        execute(config, tmp_path / "undisturbed")
        assert outputs(root, config) == outputs(tmp_path / "undisturbed", config)
