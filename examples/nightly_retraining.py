"""
Retrain every night
===================

Yesterday's network learned 400 digits, half of them with wrong labels. Tonight there are 1 400 digits with right
labels. Continue, apply a remedy, or train from scratch? :func:`pliant.treat` tries all three.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

import pliant
from pliant import data, models


# %%
# Yesterday: the network learns wrong labels by heart.
def make_checkpoint(path: Path) -> None:
    """Train a network on 400 digits, half of whose labels are wrong."""
    digits = data.load("digits")
    images, labels = digits.train.batch(torch.arange(400))
    torch.manual_seed(0)
    wrong = torch.where(torch.rand(400) < 0.5, torch.randint(10, (400,)), labels)
    model = models.create("mlp", digits.shape, 10, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _step in range(4000):
        rows = torch.randint(400, (64,))
        optimizer.zero_grad()
        cross_entropy(model(images[rows]), wrong[rows]).backward()
        optimizer.step()
    torch.save(model.state_dict(), path)


# %%
# Tonight: remedies compete on held-out data; the winner is tested on other seeds. ``methods="auto"`` tries eight.
# The runs are processes of their own, so a script needs the usual guard.
if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    make_checkpoint(folder / "yesterday.pt")
    found = pliant.treat(
        folder / "yesterday.pt",
        model="mlp",
        data="digits",
        methods="shrink_perturb:lam=0.8,fire",
        seeds=3,
        epochs=4,
        out=folder / "runs",
        workers=1,
        progress=False,
    )
    print(found.answer)

# %%
# ``found.table`` is a data frame, and ``found.code`` is the code for tonight.
if __name__ == "__main__":
    accuracy = found.table["new_accuracy"]
    figure, axes = plt.subplots(figsize=(7, 2.2), layout="constrained")
    axes.barh(accuracy.index, accuracy)
    axes.set(xlabel="test accuracy after tonight", xlim=(0.8, 1))
    print(found.code)
