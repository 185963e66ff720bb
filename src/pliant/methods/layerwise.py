"""Layerwise re-initialization: keep the first t blocks at their initial norms and re-draw the rest, for t = 1, 2, ….

Paper: Alabdulmohsin et al. 2021, "The Impact of Reinitialization on Generalization in Convolutional Neural Networks",
as the SWR paper states it in §2. Each `apply()` begins the next stage t. The weights of the first t blocks are rescaled
to their initial norms, and all later blocks are re-drawn. The last block is the head; every stage re-draws it.

Where we deviate. The paper inserts a normalization layer after block t, computed from the data. We leave it out, since
it would change the architecture during training.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pliant._precision import widen
from pliant._validation import check_modules, check_seed
from pliant.anatomy.layers import Layer, called_layers
from pliant.anatomy.parameters import role_of
from pliant.methods._core.filters import Filter
from pliant.methods._core.initial import Init, bare_modules, check_redrawable, redraw_, seeded
from pliant.methods._core.method import Batches, LossFunction
from pliant.methods._core.reinitializer import OptimizerState, Reinitializer, Steps


def rescale_to_norm_(weight: Tensor, norm: Tensor) -> None:
    """Rescale a weight in place to a Frobenius norm: W ← W·norm/‖W‖. If either norm is zero, W stays.

    Args:
        weight: W.
        norm: The target norm.

    Example:
        >>> weight = torch.tensor([[3.0, 4.0]])
        >>> rescale_to_norm_(weight, torch.tensor(10.0))
        >>> weight
        tensor([[6., 8.]])
    """
    factor = norm / widen(weight).norm()
    weight.mul_(torch.where((factor > 0) & factor.isfinite(), factor, 1))


class LayerwiseReset(Reinitializer):
    """Re-draw all but the first blocks, one block fewer at each `apply()`.

    Args:
        model: The model; its weights' current norms are the initial norms.
        example: An example input (tensor, tuple of arguments or dictionary of keyword arguments), on which
            `called_blocks` finds the blocks. Not needed if `blocks` is given.
        blocks: The blocks in order, each a list of module names. Parameters outside the blocks are left alone.
        optimizer_state: "reset" (default: a stage starts a new training) or "keep" the moments.
        init: A function that initializes the model in place, run after every module's own `reset_parameters`.
        seed: The seed of a private random stream. None draws from torch's global generators.
        where: Which parameters to touch; all learnable ones if None.
        at: Steps after which the method acts by itself, counted from 1.
        every: The number of steps between two actions by itself; None for none.
    """

    name = "layerwise"
    saved: ClassVar[tuple[str, ...]] = ("norms", "stage")

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        blocks: Sequence[Sequence[str]] | None = None,
        optimizer_state: OptimizerState = "reset",
        init: Init | None = None,
        seed: int | None = None,
        where: Filter | None = None,
        at: Steps = (),
        every: int | None = None,
    ) -> None:
        super().__init__(model, optimizer_state=optimizer_state, where=where, at=at, every=every)
        if blocks is None:
            if example is None:
                raise ValueError("example: None, and blocks is not given; pass an example input or blocks=[[names], …]")
            layers = called_layers(model, example)
            blocks = called_blocks(model, layers)
            for name in self.parameters:
                if not _is_of_called_layer(name, {layer.name for layer in layers}):
                    raise ValueError(
                        f"model: parameter {name!r} is not in a layer that was called on the example; "
                        "pass blocks=[[module names], …]"
                    )
        if len(blocks) < 2:
            raise ValueError(
                f"blocks: {blocks!r} is too short; it must hold at least two, one to keep and one to re-draw"
            )
        self.blocks = tuple(check_modules(f"blocks[{i}]", model, block) for i, block in enumerate(blocks))
        self._members = _members(model, self.blocks, self.parameters)
        check_redrawable(model, init, [name for members in self._members[1:] for name in members])  # never the first
        self.init = init
        self.seed = check_seed(seed)
        self.norms = {
            name: widen(p.detach()).norm() for name, p in self.parameters.items() if role_of(model, name, p) == "matrix"
        }
        self.stage = 0

    def _reinitialize(self, batches: Batches | None, loss_fn: LossFunction | None) -> Mapping[str, Any]:
        kept = min(self.stage + 1, len(self.blocks) - 1)
        fresh = [name for block in self._members[kept:] for name in block]
        with seeded(self.seed, self.stage):
            bare = bare_modules(self.model, [name for block in self.blocks[kept:] for name in block])
            free = self._free()
            redraw_(self.model, {name: free[name] for name in fresh if name in free}, self.init, bare)
        # If the draw above fails, nothing has changed yet and the stage can be repeated.
        for name in (name for block in self._members[:kept] for name in block):
            if name in self.norms:
                rescale_to_norm_(self.parameters[name], self.norms[name])
        self.stage += 1
        return {"stage": self.stage, "blocks_kept": kept, "blocks_redrawn": len(self.blocks) - kept}

    def _rewritten(self) -> list[nn.Parameter]:
        free = self._free()
        return [free[name] for block in self._members for name in block if name in free]


def called_blocks(model: nn.Module, layers: Sequence[Layer]) -> list[list[str]]:
    """Return the blocks of a model: a layer with a weight matrix starts a block, other layers join the last block.

    Args:
        model: The model.
        layers: Its layers in order of their calls.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.ReLU(), nn.Linear(3, 1))
        >>> called_blocks(model, called_layers(model, torch.zeros(1, 2)))
        [['0', '1'], ['3']]
    """
    blocks: list[list[str]] = []
    waiting: list[str] = []
    for layer in dict.fromkeys(layers):
        prefix = f"{layer.name}." if layer.name else ""
        own = layer.module.named_parameters(recurse=False)
        if any(role_of(model, prefix + leaf, parameter) == "matrix" for leaf, parameter in own):
            blocks.append([*waiting, layer.name])
            waiting = []
        elif blocks:
            blocks[-1].append(layer.name)
        else:
            waiting.append(layer.name)
    return blocks


def _is_of_called_layer(parameter: str, called: set[str]) -> bool:
    """Return whether a called layer owns a parameter, directly or in a submodule that it reads without a call.

    `nn.MultiheadAttention` reads the weight of its `out_proj` that way.
    """
    owner = path = parameter.rpartition(".")[0]
    while path and path not in called:
        path = path.rpartition(".")[0]
    below = f"{path}." if path else ""
    return path in called and (path == owner or not any(name.startswith(below) for name in called - {path}))


def _members(model: nn.Module, blocks: Sequence[Sequence[str]], parameters: Iterable[str]) -> list[list[str]]:
    """Return the parameters of each block's modules and of their submodules."""
    # A module may have several names; parameter names use the first one.
    names = {module: name for name, module in model.named_modules()}
    block_of = {names[model.get_submodule(name)]: number for number, block in enumerate(blocks) for name in block}
    members: list[list[str]] = [[] for _ in blocks]
    for name in parameters:
        path = name
        while path:
            path = path.rpartition(".")[0]
            if path in block_of:
                members[block_of[path]].append(name)
                break
    return members
