"""A GPT of nanoGPT's shape, small enough to read: FIRE §4.2's language model.

Weights are drawn as GPT-2 draws them: standard deviation 0.02, and 0.02 / √(2·depth) for the layers that write into the
residual stream. Every layer draws through its own `reset_parameters`, so that all resets give the same distribution.
"""

import torch
from torch import Tensor, nn

from pliant._validation import check_choice, require_positive
from pliant.models.vit import Block

_STD = 0.02
_ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}


class _Normal(nn.Module):
    """A layer with normal weights and zero biases.

    Attributes:
        std: Standard deviation of the initial weights.
    """

    std: float = _STD
    weight: Tensor

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.normal_(self.weight, std=self.std)
        if isinstance(bias := getattr(self, "bias", None), nn.Parameter):
            nn.init.zeros_(bias)


class GPTLinear(_Normal, nn.Linear):
    """A linear layer with normal weights and zero biases.

    Args:
        inputs: Number of inputs.
        outputs: Number of outputs.
        bias: Whether there is a bias.
        std: Standard deviation of the initial weights.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True, std: float = _STD) -> None:
        self.std = std
        nn.Linear.__init__(self, inputs, outputs, bias)


class GPTEmbedding(_Normal, nn.Embedding):
    """An embedding with normal weights of standard deviation 0.02."""


class GPT(nn.Module):
    """A pre-LN transformer that predicts the next token at every position.

    Args:
        vocabulary: Number of tokens.
        context: Longest sequence.
        depth: Number of blocks.
        width: Width of a token.
        heads: Number of heads.
        activation: gelu or relu, in the MLP of each block.
        tied: Whether the output layer shares the weight of the token embedding.
    """

    def __init__(
        self, vocabulary: int, context: int, depth: int, width: int, heads: int, activation: str, tied: bool
    ) -> None:
        super().__init__()
        residual_std = _STD / (2 * depth) ** 0.5
        self.tokens = GPTEmbedding(vocabulary, width)
        self.positions = GPTEmbedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, _ACTIVATIONS[activation], causal=True) for _ in range(depth))
        for block in self.blocks:
            _draw_as_gpt(block, residual_std)
        self.norm = nn.LayerNorm(width)
        self.head = GPTLinear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next token at every position: [examples, positions, vocabulary]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _draw_as_gpt(block: nn.Module, residual_std: float) -> None:
    """Replace the linear layers of a block by layers that are drawn as GPT-2's."""
    for name, module in list(block.named_modules()):
        if isinstance(module, nn.Linear):
            into_residual = name in ("attention.output", "mlp.2")
            std = residual_std if into_residual else _STD
            block.set_submodule(name, GPTLinear(module.in_features, module.out_features, std=std))


def gpt(
    shape: tuple[int, ...],
    classes: int,
    *,
    depth: int = 4,
    width: int = 128,
    heads: int = 4,
    activation: str = "gelu",
    tied: bool = True,
) -> GPT:
    """Build a GPT; by default about 0.8 million parameters.

    Args:
        shape: The length of a sequence of tokens.
        classes: Size of the vocabulary.
        depth: Number of blocks.
        width: Width of a token.
        heads: Number of heads.
        activation: gelu or relu.
        tied: Whether the output layer shares the weight of the token embedding.

    Returns:
        The network.
    """
    if len(shape) != 1:
        raise ValueError(f"shape is {shape}; a GPT reads sequences of tokens, of shape (length,)")
    require_positive(depth=depth, width=width, heads=heads)
    check_choice("activation", activation, tuple(_ACTIVATIONS))
    if width % heads:
        raise ValueError(f"heads is {heads}; it must divide width, which is {width}")
    return GPT(classes, shape[0], depth, width, heads, activation, tied)
