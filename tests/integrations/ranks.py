"""Train under a framework on the ranks of one launch, go on from its checkpoint, and save what each rank ends with.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.integrations.ranks FRAMEWORK FOLDER
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler

import pliant

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def several(model: nn.Module, example: Any) -> list[pliant.Method]:
    return [
        pliant.L2Init(model, lam=1e-2),
        pliant.SpectralRegularization(model, lam=1e-2),
        pliant.ReDo(model, example, every=3, tau=0.9, seed=0),  # scores of what all ranks see
        pliant.HareTortoise(model, every=5),
        pliant.ShrinkPerturb(model, toward="fresh", seed=0),  # a draw that all ranks share
    ]


def state_of(model: nn.Module, callback: Any) -> dict[str, Any]:
    return {
        "weights": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "acted": [step for step, receipt in callback.receipts if receipt.entries],
        "renewed": int(sum(counts.sum() for counts in callback.methods["redo"].renewals.values())),
    }


def transformers(folder: Path) -> list[dict[str, Any]]:
    from pliant.integrations.transformers import PliantCallback
    from tests.integrations.language_models import IDS, llama, trainer

    found = []
    for checkpoint in (None, folder / "checkpoint-4"):
        callback = PliantCallback(
            lambda model: several(model, {"input_ids": IDS[:2]}), at=[2, 6], monitor={"every": 3, "budget": None}
        )
        settings = {"per_device_train_batch_size": 4 // WORLD, "save_strategy": "steps", "save_steps": 4}
        run = trainer(llama(), folder, callback, ddp_backend="gloo" if WORLD > 1 else None, seed=1, **settings)
        run.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        found.append(state_of(run.accelerator.unwrap_model(run.model), callback))
    return found


def lightning(folder: Path) -> list[dict[str, Any]]:
    from lightning.pytorch import seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    from pliant.integrations.lightning import PliantCallback
    from tests.integrations.test_lightning import EXAMPLE, INPUTS, Automatic, fit, loader

    found = []
    for path in (None, folder / "epoch=0.ckpt"):
        seed_everything(0)
        # Not Adam, which makes a whole step of a gradient that is zero up to rounding.
        module = Automatic(partial(torch.optim.SGD, momentum=0.9))
        callback = PliantCallback(
            lambda module: several(module.net, EXAMPLE), at=[2, 8], monitor={"every": 3, "budget": None}
        )
        keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
        ranks = {"devices": WORLD, "strategy": "ddp", "use_distributed_sampler": False} if WORLD > 1 else {}
        data = loader(8 // WORLD, DistributedSampler(INPUTS, WORLD, RANK, shuffle=False))  # Lightning's own shuffles
        fit(module, folder, callback, *([] if path else [keep]), path=path, data=data, **ranks)
        found.append(state_of(module, callback))
    return found


def save(framework: str, folder: Path) -> None:
    results = {"transformers": transformers, "lightning": lightning}[framework](folder)
    torch.save(results, folder / f"{framework}.{WORLD}.{RANK}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    save(sys.argv[1], Path(sys.argv[2]))
