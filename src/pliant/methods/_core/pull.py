"""The arithmetic of soft weight rescaling: norms of weights in, factors of all that is written out.

It is a handful of numbers, so what it costs is the calls. On an accelerator the small kernels are queued, and nobody
waits. On the host they would cost as much as both passes over the weights of a small network; Python's own floats do
the same for a fraction of it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def log_factors(norms: Tensor, initial_norms: Tensor, lam: Tensor) -> Tensor:
    """Return log c for c = (λ‖W₀‖ + (1−λ)‖W‖)/‖W‖.

    Args:
        norms: ‖W‖ of each weight; one that is all zero or not finite cannot be scaled back and gets c = 1.
        initial_norms: ‖W₀‖ of each weight.
        lam: λ of each weight.

    Example:
        >>> import torch
        >>> log_factors(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([0.5])).exp()
        tensor([0.7500])
    """
    return torch.lerp(norms, initial_norms, lam).div_(norms).log_().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def rows_that_follow(matrix: Tensor, pulled: Tensor) -> list[int]:
    """Return which rows of a plan follow a weight that is pulled.

    What stays is not even multiplied by one: a graph that holds it would be spoilt.

    Args:
        matrix: From log c of the weights to the log-factors of all that could be written.
        pulled: Whether each weight is pulled.

    Example:
        >>> rows_that_follow(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([False, True]))
        [1, 2]
    """
    rows: list[int] = matrix[:, pulled.cpu()].any(1).nonzero().flatten().tolist()
    return rows


class DevicePull:
    """Rescales where the weights are, and never waits for the device.

    Args:
        initial_norms: ‖W₀‖ of each weight.
        lam: λ of each weight.
        matrix: From log c of the weights to the log-factors of all that could be written.
        rows: The rows of it that are.
    """

    def __init__(self, initial_norms: Tensor, lam: Tensor, matrix: Tensor, rows: Sequence[int]) -> None:
        self._initial_norms, self._lam = initial_norms, lam
        self._rows = rows
        self._matrix = matrix[rows].to(lam)

    def __call__(
        self, norms: Sequence[Tensor], written: Sequence[Tensor], rates: Tensor | None, found_inf: Tensor | None
    ) -> Tensor:
        """Multiply what is written, in place; return log c of each weight.

        Args:
            norms: ‖W‖ of each weight.
            written: The tensors to multiply.
            rates: A factor of each λ; none if None. No λ grows beyond 1, which is all the way back.
            found_inf: Not zero if the optimizer skipped its step, as a fused one does under a GradScaler: then c = 1.
        """
        lam = self._lam if rates is None else (self._lam * rates.to(self._lam)).clamp_max_(1)
        log_c = log_factors(torch.stack(list(norms)), self._initial_norms, lam)
        if found_inf is not None:
            log_c = torch.where(found_inf == 0, log_c, 0)
        if self._rows:
            # Not `mv`, which autocast would compute in half precision.
            factors = (self._matrix * log_c).sum(1).exp_()
            torch._foreach_mul_([written[row] for row in self._rows], factors.unbind())
        return log_c


class HostPull:
    """Rescales weights on the host: `DevicePull` in Python's floats, which are float64 whatever the weights are.

    So log c comes from c − 1, which is exact to the last digit for a small λ; in the weights' own precision, as on a
    device, the difference of two norms that are near each other would be no better than their quotient.
    """

    def __init__(self, initial_norms: Tensor, lam: Tensor, matrix: Tensor, rows: Sequence[int]) -> None:
        self._weights = list(zip(initial_norms.tolist(), lam.tolist(), strict=True))
        self._rows = rows
        self._entries = [[(j, entry) for j, entry in enumerate(row) if entry] for row in matrix[rows].tolist()]

    def __call__(
        self, norms: Sequence[Tensor], written: Sequence[Tensor], rates: Tensor | None, found_inf: Tensor | None
    ) -> Sequence[float]:
        """Multiply what is written, in place; return log c of each weight."""
        if found_inf is not None and found_inf.item():
            return [0.0] * len(norms)
        weights = self._weights
        if rates is not None:
            weights = [(norm, min(lam * rate, 1.0)) for (norm, lam), rate in zip(weights, rates.tolist(), strict=True)]
        log_c = []
        for tensor, (initial_norm, lam) in zip(norms, weights, strict=True):
            norm = tensor.item()
            change = lam * (initial_norm / norm - 1) if 0.0 < norm < math.inf else 0.0
            # All the way back from far away is −1 to the last digit, of which there is no logarithm.
            log_c.append(math.log1p(change) if change > -1.0 else math.log(initial_norm / norm))
        if self._rows:
            factors = [math.exp(sum([entry * log_c[j] for j, entry in row])) for row in self._entries]
            torch._foreach_mul_([written[row] for row in self._rows], factors)
        return log_c
