"""Save runs through torch.distributed.checkpoint on some ranks, and continue them on others.

    python -m tests.distributed.checkpoints save|load RANK WORLD FOLDER SAVED [METHOD ...]

Each method has its own checkpoint in FOLDER/SAVED, written by SAVED ranks; all methods if none is named. "save"
continues to the end without the checkpoint; "load" loads it. Both write what each rank ends with to
FOLDER/PHASE.WORLD.RANK.pt.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from pliant import methods
from tests.distributed import networks
from tests.distributed.cells import STEPS, Run
from tests.distributed.launching import joined

SETTINGS: dict[str, dict[str, Any]] = {
    # By default each rank keeps inputs that it has seen, with which other ranks cannot continue.
    "c_chain": {"reference": lambda: networks.batch("mlp", 50)[0]},
}


def state_of(run: Run) -> dict[str, Any]:
    """Return the state of the model, the optimizer and the method."""
    model, optimizer = get_state_dict(run.inner, run.optimizer)
    return {"model": model, "optimizer": optimizer, "method": run.method.state_dict()}


def main(phase: str, rank: int, world: int, folder: str, saved: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with joined(rank, world, Path(folder) / f"{phase}.{world}.rendezvous"):
        results = {}
        for name in names or methods.names():
            run = Run("fsdp" if world > 1 else "single", name, "adamw", "mlp", **SETTINGS.get(name, {}))
            checkpoint = Path(folder) / saved / name
            if phase == "save":
                run.method.attach(run.optimizer)
                run.train(range(STEPS // 2))
                dcp.save(state_of(run), checkpoint_id=checkpoint)
            else:
                if name == "plasticity_injection":  # a checkpoint fills only what the model has
                    run.method.apply(run.optimizer)
                state = state_of(run)
                dcp.load(state, checkpoint_id=checkpoint)
                set_state_dict(
                    run.inner, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
                )
                run.method.load_state_dict(state["method"])
                run.method.attach(run.optimizer)
            run.train(range(STEPS // 2, STEPS))
            results[name] = run.values()
        torch.save(results, Path(folder) / f"{phase}.{world}.{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
