"""How a method keeps the initial values θ₀: in full, in half of the memory, or as the seed they were drawn from."""

import copy
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from pliant._validation import check_choice
from pliant.distributed import held, is_shard, own_part
from pliant.methods._core.initial import drawing_from, reset_function

Store = Literal["full", "bf16", "seed"]


def keep_initial(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], store: Store, seed: int | None = None
) -> dict[str, Tensor]:
    """Return what is stored of the present values: nothing if they can be drawn from the seed again.

    Args:
        model: The model.
        parameters: The parameters whose values are initial.
        store: "full", "bf16", or "seed".
        seed: The seed before the model was made, as in `torch.manual_seed(seed); model = Model()`.

    Raises:
        ValueError: If drawing from the seed does not give exactly these values.
    """
    check_choice("store", store, get_args(Store))
    if store != "seed":
        values = {name: parameter.detach() for name, parameter in parameters.items()}
        return {
            name: v.bfloat16() if store == "bf16" and v.is_floating_point() else v.clone() for name, v in values.items()
        }
    if seed is None:
        raise ValueError("seed: None is given, but store='seed' draws θ₀ from it again")
    missing = set(parameters)
    for drawn in draw_initial(model, parameters, seed):
        missing -= {name for name, values in drawn.items() if torch.equal(values, parameters[name].detach())}
    if missing:
        raise ValueError(
            f"store: seed {seed} does not give the values of {sorted(missing)[0]!r} again. Make the model right after "
            "torch.manual_seed(seed), where its modules draw in their order by their own reset_parameters(), or pass "
            "store='bf16'"
        )
    return {}


@torch.no_grad()
def draw_initial(model: nn.Module, parameters: Mapping[str, Tensor], seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield the values that `torch.manual_seed(seed); model = Model()` draws, one module at a time.

    The model and the random generators keep their values. Modules that write into their children are left out.

    Args:
        model: The model.
        parameters: The parameters to draw, by name; of a shard, this rank's part is drawn.
        seed: The seed.

    Example:
        >>> _ = torch.manual_seed(3)
        >>> model = nn.Linear(2, 1)
        >>> (values,) = draw_initial(model, dict(model.named_parameters()), 3)
        >>> torch.equal(values["weight"], model.weight)
        True
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    with drawing_from(seed):
        for module in model.modules():
            own = {leaf: p for leaf, p in module._parameters.items() if p is not None}
            if not own or reset_function(module) is None:
                continue
            twin = copy.copy(module)  # without children, which its initializer might write
            twin._modules = {}
            twin._parameters = {**module._parameters, **{leaf: _empty_like(p) for leaf, p in own.items()}}
            twin._buffers = {leaf: None if b is None else b.clone() for leaf, b in module._buffers.items()}
            reset = reset_function(twin)
            assert reset is not None
            try:
                reset()
            except AttributeError:
                continue
            drawn = {names[id(p)]: (twin._parameters[leaf], p) for leaf, p in own.items() if id(p) in names}
            yield {
                name: (own_part(values, held(p)) if is_shard(p) else values).detach()
                for name, (values, p) in drawn.items()
                if values is not None
            }


def _empty_like(parameter: nn.Parameter) -> nn.Parameter:
    whole = held(parameter) if is_shard(parameter) else parameter
    empty = torch.empty(whole.shape, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)
