"""Two CIFAR-10 checkpoints to treat, a worn one and a healthy one: `python -m benchmarks.treat FOLDER`.

Both are the small CNN of the soft weight rescaling paper, trained on 1 000 gray images. The worn one memorized them
with half of the labels wrong. The healthy one saw them for five epochs with their true labels. Tonight's data is 2 000
other images, in color. benchmarks/results/treat holds what `pliant treat` makes of both.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from pliant import data, models
from pliant.data.dataset import Dataset
from pliant.streams import SingleTask
from pliant.training import Learner, Settings, train

OLD, NEW, TESTED = 1000, 2000, 1000
EPOCHS = {"worn": 150, "healthy": 5}


def old_night(wrong: float = 0.0) -> Dataset:
    """Return what the checkpoints learned: gray images, a part of them with random labels."""
    night = _make_night(slice(OLD), gray=True)
    draw = torch.Generator().manual_seed(0)
    changed = torch.rand(OLD, generator=draw) < wrong
    labels = torch.where(changed, torch.randint(10, (OLD,), generator=draw), night.train.y)
    return Dataset(night.name, night.train.relabel(labels), night.test, night.classes)


def tonight() -> Dataset:
    """Return the new data: other images, in color."""
    return _make_night(slice(OLD, OLD + NEW), gray=False)


def _make_night(part: slice, gray: bool) -> Dataset:
    whole = data.load("cifar10")

    def take(images: Tensor, part: slice) -> Tensor:
        chosen = images[part]
        return chosen.float().mean(1, keepdim=True).expand_as(chosen).to(torch.uint8) if gray else chosen.clone()

    return data.from_tensors(
        "cifar10",
        (take(whole.train.x, part), whole.train.y[part].clone()),
        (take(whole.test.x, slice(TESTED)), whole.test.y[:TESTED].clone()),
        whole.classes,
    )


def make_checkpoint(name: str, path: Path) -> None:
    """Train the network of one of the two checkpoints and save its weights."""
    night = old_night(wrong=0.5 if name == "worn" else 0.0)
    model = models.create("cnn", night.shape, len(night.classes), seed=0)
    stream = SingleTask(night, 0, epochs=EPOCHS[name])
    *_, last = train(Learner(model, Settings(batch_size=64, evaluate_every=50)), stream, seed=0)
    torch.save(model.state_dict(), path)
    print(f"{path}: training accuracy {last['train_accuracy']:.3f}, test accuracy {last['test_accuracy']:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for checkpoint in EPOCHS:
        make_checkpoint(checkpoint, Path(sys.argv[1]) / f"{checkpoint}.pt")
