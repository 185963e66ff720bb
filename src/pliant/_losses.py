"""The loss of class indices, of examples or of every token."""

from torch import Tensor
from torch.nn.functional import cross_entropy


def class_loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of class indices; scores of tokens, [examples, tokens, vocabulary], have classes last.

    Example:
        >>> import torch
        >>> class_loss(torch.zeros(2, 5, 4), torch.ones(2, 5, dtype=torch.int64))  # log 4 for every token
        tensor(1.3863)
    """
    if targets.ndim > 1 and not targets.is_floating_point() and outputs.shape[:-1] == targets.shape:
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return cross_entropy(outputs, targets, reduction=reduction)
