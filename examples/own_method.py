"""
Write your own method
=====================

A penalty that pulls parameters toward zero by their absolute value, λ‖θ‖₁. The formula is four lines; the base class
brings hooks, closures, loss scaling, receipts, saving and loading, and many processes. Other kinds of methods have base
classes of their own: see CONTRIBUTING.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from pliant.methods import Penalty


# %%
# A penalty says what its value is, and adds its gradient to the given ones.
class L1(Penalty):
    """Pull every learnable parameter toward zero by the same amount."""

    name = "l1"

    @torch.no_grad()
    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return Σ λ‖θ‖₁."""
        chosen = [name for name in self.strengths if names is None or name in names]
        return sum((self.strengths[name] * self.parameters[name].abs().sum() for name in chosen), torch.zeros(()))

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        for name, gradient in gradients.items():
            direction = self.strengths[name] * self.parameters[name].detach().sign()
            gradient.add_(direction if scale is None else scale * direction)


# %%
# It attaches as every other method does.
pixels, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)


def train(lam: float) -> nn.Linear:
    """Return a trained linear classifier."""
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    method = L1(model, lam=lam).attach(optimizer)
    for _step in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"λ = {lam}: accuracy {accuracy:.2f}; {method.receipt}")
    return model


plain, sparse = train(0.0), train(1e-2)

# %%
# Pixels that do not matter have lost their weights.
figure, axes = plt.subplots(1, 2, figsize=(6, 3), layout="constrained")
for place, (name, model) in enumerate((("λ = 0", plain), ("λ = 0.01", sparse))):
    axes[place].imshow(model.weight.detach().abs().mean(0).reshape(8, 8), cmap="viridis")
    axes[place].set(title=name, xticks=[], yticks=[])
figure.suptitle("mean |weight| of each pixel")
