"""
Lightning
=========

A network learns the digits, then the digits with their pixels in another order. One callback attaches spectral
regularization and lets shrink & perturb act when the second data set begins.
"""

import logging
import warnings

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pliant
from pliant.integrations.lightning import PliantCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

pixels, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
order = torch.randperm(64, generator=torch.Generator().manual_seed(0))


# %%
# An ordinary module; it does not know of Pliant. After three epochs the pixels change their order.
class Classifier(LightningModule):
    """A classifier that records its accuracy on each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.seen: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        images = batch[0] if self.current_epoch < 3 else batch[0][:, order]
        output = self.net(images)
        self.seen.append((output.argmax(1) == batch[1]).float().mean().item())
        return nn.functional.cross_entropy(output, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


# %%
# Integers in `at` are steps, floats are epochs: shrink & perturb acts after the third epoch.
seed_everything(0, verbose=False)
callback = PliantCallback(
    lambda module: [pliant.SpectralRegularization(module.net), pliant.ShrinkPerturb(module.net)], at=[3.0]
)
module = Classifier()
trainer = Trainer(
    max_epochs=6, accelerator="cpu", callbacks=[callback], logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True))
print(callback.receipts[0][1])

# %%
# Accuracy on each batch before the network learned it.
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
axes.plot(module.seen)
axes.axvline(len(module.seen) // 2, color="C7", linestyle=":", label="the pixels change their order")
axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1))
axes.legend()
