"""Export metrics to TensorBoard."""

from pathlib import Path

from pliant._importing import naming_extra
from pliant.experiments.store import load_runs


def export(root: Path, target: Path) -> int:
    """Write the metrics and measures of every run as event files of TensorBoard.

    Args:
        root: The folder of the experiment.
        target: The folder to write; it gets one folder a run, and an earlier export is replaced.

    Returns:
        The number of runs.
    """
    with naming_extra("this export", "tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    count = 0
    for run in load_runs(root):
        records = run.records
        for old in (target / run.id).glob("events.out.tfevents.*"):
            old.unlink()
        with SummaryWriter(str(target / run.id)) as writer:
            for record in records:
                measured, step = record.get("measures", {}), record.get("step")
                if not isinstance(measured, dict) or not isinstance(step, int):
                    raise ValueError(
                        f"{run.path / 'metrics.jsonl'} holds a record that no run writes: step is {step!r}"
                    )
                measures = {f"measures/{name}": value for name, value in measured.items()}
                for name, value in (record | measures).items():
                    if isinstance(value, int | float) and name != "step":
                        writer.add_scalar(name, value, step)
        count += 1
    return count
