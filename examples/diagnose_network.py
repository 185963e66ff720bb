"""
Diagnose a network
==================

Has this network lost plasticity, and where? :func:`pliant.diagnose` lets copies of it learn new data beside fresh
networks, and then looks for signs, layer by layer.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import pliant

pixels, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)


# %%
# Damage a network: it learns ten sets of random labels.
def build() -> nn.Module:
    """Return an untrained network."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


torch.manual_seed(0)
model = build()
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
for _task in range(10):
    wrong = torch.randint(0, 10, (128,))
    for _step in range(50):
        optimizer.zero_grad()
        cross_entropy(model(images[:128]), wrong).backward()
        optimizer.step()

# %%
# The model stays as it is: only throwaway copies learn.
found = pliant.diagnose(model, (images, labels), cross_entropy, fresh=build, steps=100)
print(found)

# %%
# The curves behind the verdict: copies of the network beside fresh ones.
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for pair in found.trial.pairs:
    axes.plot(found.trial.steps, pair.aged, color="C1", label="this network" if pair is found.trial.pairs[0] else None)
    axes.plot(found.trial.steps, pair.fresh, color="C7", label="fresh" if pair is found.trial.pairs[0] else None)
axes.set(xlabel="training steps on the new data", ylabel="held-out accuracy", ylim=(0, 1))
axes.legend()
