"""The Ray engine on a real cluster of several local nodes, one of which is killed."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from pliant import cli
from pliant._command_options import EngineName
from pliant._files import BusyError, exclusive
from pliant.experiments.engines import RayEngine
from pliant.experiments.run import execute
from pliant.experiments.run_config import RunConfig
from pliant.experiments.scheduler import run_all
from pliant.experiments.store import RunFolder, load_runs
from tests.experiments.helpers import outputs, small, write_waiting_network
from tests.experiments.test_scheduler import Notebook, write_network


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, so that everything runs on nodes that may be killed."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": 80_000_000,
            "_system_config": {"worker_niceness": 0},  # By default Ray's workers wait for all other tests.
        },
    )
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def engine(cluster: Cluster) -> Iterator[RayEngine]:
    engine = RayEngine(cluster.address)
    yield engine
    engine.close()


def is_free(root: Path, config: RunConfig) -> bool:
    """Whether no process holds a run that was begun."""
    try:
        with exclusive(root / "runs" / config.id / "lock"):
            return True
    except BusyError:
        return False


def test_a_node_that_dies_takes_no_run_with_it(tmp_path: Path, cluster: Cluster, engine: RayEngine) -> None:
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=80_000_000) for _ in range(2)]
    cluster.wait_for_nodes()
    assert engine.capacity() == 4
    failing = small(model=write_network(tmp_path / "bad.py", "raise RuntimeError('on every node')"))
    configs = [small(seed=seed, model=write_waiting_network(tmp_path, step=45)) for seed in range(3)] + [failing]
    root = tmp_path / "ray"

    class Killer(Notebook):
        """Kills the first node when either node is in the middle of a run; lets the other go on once that one died."""

        under_way: tuple[RunConfig, ...] = ()

        def tick(self, active: Iterable[RunConfig]) -> None:
            if self.under_way:
                if any(is_free(root, config) for config in self.under_way):
                    (tmp_path / "go").touch()
            elif len(list(tmp_path.glob("*.waits"))) == 2:
                self.under_way = tuple(config for config in active if RunFolder(root, config).records())
                cluster.remove_node(nodes[0], allow_graceful=False)

    killer = Killer()
    statuses = run_all(configs, root, engine, killer, checkpoint_seconds=0)
    assert len(killer.under_way) == 2
    assert [statuses[config.id] for config in configs] == ["finished"] * 3 + ["failed"]
    assert "RuntimeError: on every node" in killer.outcomes[failing.id].error
    starts = sum(event["event"] == "start" for run in load_runs(root) for event in run.events)
    assert starts == len(configs) + 1
    for config in configs[:3]:
        execute(config, tmp_path / "here")
        assert outputs(root, config) == outputs(tmp_path / "here", config)


def test_requests_reach_ray(tmp_path: Path, cluster: Cluster, engine: RayEngine) -> None:
    """A run that asks for a GPU waits for a node that has one, as the command line's options say."""
    node = cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=80_000_000)
    cluster.wait_for_nodes()
    where = write_network(
        tmp_path / "own.py", f"Path({str(tmp_path / 'gpu')!r}).write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    asked = cli._make_engine(EngineName.RAY, workers=None, threads=2, gpus=0.5, address=cluster.address)
    statuses = run_all([small(model=where)], tmp_path, asked, Notebook())
    assert set(statuses.values()) == {"finished"}
    assert (tmp_path / "gpu").read_text() == "0"
    (run,) = load_runs(tmp_path)
    assert run.events[0]["environment"]["threads"] == 2
    cluster.remove_node(node)
