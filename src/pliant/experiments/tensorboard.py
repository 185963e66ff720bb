"""Metrics for TensorBoard."""

from pathlib import Path

from pliant.experiments.store import load_runs


def export(root: Path, target: Path) -> int:
    """Write the metrics of every run as TensorBoard's event files.

    Args:
        root: The experiment's folder.
        target: Where to write; a folder a run.

    Returns:
        How many runs were written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("this export needs TensorBoard: pip install 'pliant[tensorboard]'") from error
    count = 0
    for run in load_runs(root):
        with SummaryWriter(str(target / run.id)) as writer:
            for record in run.records:
                for name, value in record.items():
                    if isinstance(value, int | float) and name != "step":
                        writer.add_scalar(name, value, record["step"])
        count += 1
    return count
