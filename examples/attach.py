"""
Attach a method to a plain loop
===============================

One network learns eight sets of random labels of the same 400 digits. Plain training learns each set worse than the one
before. With spectral regularization, one line more, it continues to learn.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import pliant

images = torch.tensor(load_digits().data[:400], dtype=torch.float32) / 16


# %%
# The loop is ordinary. The method uses the optimizer's own hooks, so nothing inside the loop changes.
def train(with_method: bool) -> list[float]:
    """Return the accuracy at the end of each task."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if with_method:
        pliant.SpectralRegularization(model, lam=1e-3).attach(optimizer)  # the new line
    draw = torch.Generator().manual_seed(0)
    accuracies = []
    for _task in range(8):
        labels = torch.randint(10, (len(images),), generator=draw)
        for _epoch in range(30):
            for rows in torch.randperm(len(images), generator=draw).split(40):
                optimizer.zero_grad()
                cross_entropy(model(images[rows]), labels[rows]).backward()
                optimizer.step()
        accuracies.append((model(images).argmax(1) == labels).float().mean().item())
    return accuracies


plain, treated = train(with_method=False), train(with_method=True)

# %%
# Both networks see the same labels in the same order.
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name, values in (("plain training", plain), ("with spectral regularization", treated)):
    axes.plot(range(1, 9), values, marker="o", label=name)
axes.set(xlabel="task: each brings new labels", ylabel="accuracy at the task's end", ylim=(0, 1.05))
axes.legend()
print(f"last task: {plain[-1]:.2f} with plain training, {treated[-1]:.2f} with the method")
