"""
Two processes
=============

The same code trains under ``DistributedDataParallel``. The replicas stay bit-equal, because methods agree on seeds and
share what they measure. Started as ``torchrun --nproc-per-node 2 two_processes.py``; without torchrun the file starts
itself so.
"""

import os
import subprocess
import sys

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import pliant


# %%
# What each process does. Nothing but the wrapping differs from one process.
def train() -> None:
    """Train one replica on its half of every batch."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    redo = pliant.ReDo(model, images[:1], tau=0.1, every=20).attach(optimizer)
    draw = torch.Generator().manual_seed(0)
    for _step in range(60):
        rows = torch.randint(len(images), (64,), generator=draw).chunk(2)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    both = [torch.empty_like(mine) for _ in range(2)]
    distributed.all_gather(both, mine)
    if rank == 0:
        print(redo.receipt)
        print("replicas are bit-equal:", torch.equal(*both))
    distributed.barrier()
    distributed.destroy_process_group()


# %%
# ReDo scores a unit on the batches of both processes, and both renew the same units with the same draw.
if "RANK" in os.environ:
    train()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process whose interpreter shuts down
else:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", sys.argv[0]]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if ended.returncode:
        raise RuntimeError(ended.stderr)
    print(ended.stdout)
