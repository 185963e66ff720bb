"""Plasticity injection: a fresh head learns on top of the old one, which is frozen (Nikishin et al. 2023).

Paper: "Deep reinforcement learning with plasticity injection". The head h of a network becomes

    h(x) + h′₁(x) − h′₂(x),

where h is frozen, h′₁ is a fresh head that learns, and h′₂ is a frozen copy of h′₁ at its start. At the moment of the
injection the output does not change, and the number of learnable parameters stays the same. If learning improves after
an injection, the head had lost its plasticity: the injection is also a diagnosis.

The parameters of the head stay where they are and become h′₁'s, so optimizers and other methods keep them. The frozen
copies are buffers of the `nn.Sequential` that holds the head, and part of its `state_dict()`. Another injection
freezes h′₁ as well: each adds two frozen heads.

Injecting into a single linear layer would change nothing but the optimizer's state, because W + W′₁ − W′₂ has the
gradient of W. The head therefore has at least two weight layers.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pliant._validation import check_positive_int, check_seed
from pliant.anatomy.parameters import role_of
from pliant.distributed import Group, Shards, splits_inputs
from pliant.methods._core.filters import learnable_parameters
from pliant.methods._core.initial import Init, check_redrawable, redraw_, seeded
from pliant.methods._core.method import Batches, LossFunction
from pliant.methods._core.reinitializer import OptimizerState, Reinitializer, Steps

_PREFIX = "injected_"


class InjectedSequential(nn.Sequential):
    """An `nn.Sequential` whose last modules, the head, have frozen copies that are added and subtracted in turn.

    `inject_into` makes it out of an `nn.Sequential`; names and parameters stay.

    Attributes:
        start: The position of the head's first module.
        templates: The modules of the head without parameters of their own and without hooks, to compute the copies.
    """

    start: int
    templates: list[nn.Module]

    def forward(self, input: Any) -> Any:
        """Return head(x) + copy₁(x) − copy₂(x) + …, where x is the output of the modules before the head."""
        modules = list(self._modules.items())
        for _, module in modules[: self.start]:
            input = module(input)
        output = input
        for _, module in modules[self.start :]:
            output = module(output)
        # In a pass, fully_shard may cast the parameters to a lower precision, but no buffers.
        dtypes = {(name, leaf): parameter.dtype for name, leaf, parameter in self.head_parameters()}
        for number in range(self.copies):
            copied = input
            for (name, _), template in zip(modules[self.start :], self.templates, strict=True):
                leaves = [leaf for leaf, _ in template.named_parameters()]
                frozen = {leaf: getattr(self, _buffer(number, name, leaf)).to(dtypes[name, leaf]) for leaf in leaves}
                copied = functional_call(template.train(self.training), frozen, (copied,))
            output = output + copied if number % 2 == 0 else output - copied
        return output

    @property
    def copies(self) -> int:
        """The number of frozen copies of the head."""
        return len({name.split("_")[1] for name in self._buffers if name.startswith(_PREFIX)})

    def freeze_copy(self) -> None:
        """Add a frozen copy of the head as it is now. The first copy is added to the output, the second subtracted."""
        number = self.copies
        for name, leaf, parameter in self.head_parameters():
            self.register_buffer(_buffer(number, name, leaf), parameter.detach().clone())

    def head_parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield the parameters of the head, each with the name of its module and its name in there."""
        for name, module in list(self._modules.items())[self.start :]:
            for leaf, parameter in module.named_parameters() if module is not None else ():
                yield name, leaf, parameter

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        # Take the frozen copies that the state has, be they more or fewer than now.
        for name in [name for name in self._buffers if name.startswith(_PREFIX)]:
            del self._buffers[name]
        like = next(parameter for _, _, parameter in self.head_parameters())
        for key, value in state_dict.items():
            if key.startswith(prefix + _PREFIX):
                self.register_buffer(key[len(prefix) :], torch.empty_like(value, dtype=like.dtype, device=like.device))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _buffer(number: int, module: str, leaf: str) -> str:
    return f"{_PREFIX}{number}_{module}_{leaf.replace('.', '_')}"


def inject_into(module: nn.Sequential, start: int) -> InjectedSequential:
    """Turn an `nn.Sequential` into an `InjectedSequential`, in place; its function stays.

    Args:
        module: The module.
        start: The position of the head's first module.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> x = torch.ones(1, 2)
        >>> before, injected = model(x), inject_into(model, 0)
        >>> injected.freeze_copy()  # the old head
        >>> model[0].reset_parameters()
        >>> injected.freeze_copy()  # the fresh head at its start
        >>> torch.allclose(model(x), before)
        True
    """
    # Like torch's parametrizations, change the class: a module around it would change the names of all parameters.
    module.__class__ = InjectedSequential
    assert isinstance(module, InjectedSequential)
    module.start = start
    # Apart from the model, because hooks of the head, such as fully_shard's, are not for its copies.
    module.templates = [copy.deepcopy(each).to("meta") for each in list(module)[start:]]
    for part in (part for template in module.templates for part in template.modules()):
        part._forward_hooks, part._forward_pre_hooks = OrderedDict(), OrderedDict()
    return module


def find_start(module: nn.Sequential, layers: int) -> int:
    """Return the position from which on a Sequential has this many modules with weight matrices.

    Args:
        module: The module.
        layers: The number of weight layers.

    Raises:
        ValueError: If it has fewer.

    Example:
        >>> find_start(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), 2)
        1
    """
    places = [
        place
        for place, child in enumerate(module)
        if any(role_of(child, name, p) == "matrix" for name, p in child.named_parameters())
    ]
    if len(places) < layers:
        raise ValueError(
            f"head: it has {len(places)} weight layers, but layers={layers}; name another module with head="
        )
    return places[-layers]


class PlasticityInjection(Reinitializer):
    """Freeze the head and let a fresh one learn on top of it, on `apply()`.

    Args:
        model: The model. The class of the `nn.Sequential` that holds the head becomes `InjectedSequential`.
        head: The name of the `nn.Sequential` whose last modules are the head; None if it is the model itself.
        layers: The number of weight layers of the head, at least 2.
        optimizer_state: "reset" (default: a fresh head has no history) or "keep" the moments of the head.
        init: A function that initializes the model in place, run after every module's own `reset_parameters`.
        seed: The seed of a private random stream. None draws from torch's global generators.
        at: Steps after which the method acts by itself, counted from 1.
        every: The number of steps between two actions by itself; None for none.
    """

    name = "plasticity_injection"
    action: ClassVar[str] = "inject a fresh head"
    saved: ClassVar[tuple[str, ...]] = ("draws",)

    def __init__(
        self,
        model: nn.Module,
        *,
        head: str | None = None,
        layers: int = 2,
        optimizer_state: OptimizerState = "reset",
        init: Init | None = None,
        seed: int | None = None,
        at: Steps = (),
        every: int | None = None,
    ) -> None:
        learnable_parameters(model)  # rejects unsuitable parameters before the head is sought
        self.head = head or ""
        sequential = self._find(model, head)
        if check_positive_int("layers", layers) < 2:
            raise ValueError(
                f"layers: {layers!r} is not allowed; it must be ≥ 2, because injecting into a single linear layer "
                "changes nothing"
            )
        start = find_start(sequential, layers)
        tail = list(sequential)[start:]
        if any(True for module in tail for _ in module.buffers()):
            raise ValueError(
                "head: it has buffers, such as running statistics, which its copies would share; choose fewer layers"
            )
        ours = {id(p) for module in tail for p in module.parameters()}
        names = {name for name, p in model.named_parameters() if id(p) in ours}
        super().__init__(
            model, optimizer_state=optimizer_state, where=lambda name, _: name in names, at=at, every=every
        )
        check_redrawable(model, init, self.parameters)
        inject_into(sequential, start)
        self.init = init
        self.seed = check_seed(seed)
        self.draws = 0

    def _adopt(self, shards: Shards, *, whole: bool = True) -> None:
        super()._adopt(shards, whole=whole)
        first = next(iter(self.parameters))
        if splits_inputs(self.model, first):
            raise ValueError(
                f"model: parallelize_module splits the inputs of {first!r} over the ranks, with which the head begins; "
                "leave the layer out of the plan, or choose other layers="
            )

    def _agree(self, group: Group | None) -> None:
        made = self._injected().copies // 2
        if made < self.draws:
            raise ValueError(
                f"model: it has the frozen heads of {made} injections, but the state of {self.name} was saved "
                f"after {self.draws}. Load the model's state too; torch.distributed.checkpoint fills only what the "
                "model has, so call apply() as often before loading"
            )
        super()._agree(group)

    def _injected(self) -> InjectedSequential:
        sequential = self.model.get_submodule(self.head)
        assert isinstance(sequential, InjectedSequential)
        return sequential

    @staticmethod
    def _find(model: nn.Module, head: str | None) -> nn.Sequential:
        found = dict(model.named_modules())
        sequential = found.get(head or "")
        if type(sequential) in (nn.Sequential, InjectedSequential):
            assert isinstance(sequential, nn.Sequential)
            return sequential
        known = [name for name, module in found.items() if type(module) in (nn.Sequential, InjectedSequential) and name]
        shown = f"a {type(sequential).__name__}" if sequential is not None else "not a module of the model"
        raise ValueError(
            f"head: {head or 'the model'!r} is {shown}; it must be an nn.Sequential whose last modules are the head "
            f"(there are {', '.join(known) or 'none'})"
        )

    def _reinitialize(self, batches: Batches | None, loss_fn: LossFunction | None) -> Mapping[str, Any]:
        sequential = self._injected()
        sequential.freeze_copy()
        with seeded(self.seed, self.draws):
            redraw_(self.model, self._free(), self.init)
        sequential.freeze_copy()
        self.draws += 1
        frozen: Sequence[Tensor] = [
            b for name, b in sequential.named_buffers(recurse=False) if name.startswith(_PREFIX)
        ]
        return {"injections": sequential.copies // 2, "frozen_entries": sum(tensor.numel() for tensor in frozen)}
