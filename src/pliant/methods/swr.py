"""Soft weight rescaling: after every step, pull each weight's norm towards its initial norm, keeping predictions.

Paper: "Recovering Plasticity of Neural Networks via Soft Weight Rescaling", §3 and Algorithm 1. Each weight wishes for
the factor c = (λ‖W₀‖ + (1−λ)‖W‖) / ‖W‖; the other parameters follow, so that the network's output is only multiplied by
a constant (docs/proportionality.md).

Where we deviate. Algorithm 1 as printed scales the final norm layer's shift by one factor too many; both modes mend
that. The default also scales a bias between two norm layers by the product since the last one, and moves batch norm's
running statistics with their input, without which the function changes; `mode="paper"` does neither. Beyond the paper:
`coupled=True` lets λ follow the learning rate, λ_t = λ·lr_t/lr₀, which keeps the balance between gradient and rescaling
through a decay; `on_decay="reinit"` is the paper's own answer (appendix E). λ = 1 is hard rescaling.
"""

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._step_hooks import before_step
from pliant._validation import check_choice, check_number, check_positive_int
from pliant._warnings import warn_user
from pliant.anatomy.chain import Mode, chain_layers, chain_plan
from pliant.anatomy.export import ExampleError, GraphError
from pliant.anatomy.layers import Layer, called_layers, classifier_names
from pliant.anatomy.plan import BlockTensors
from pliant.anatomy.rescaling import OnConflict, ScaleGraph, analyze
from pliant.anatomy.verify import drift, run_graph
from pliant.methods._core.after_step import AfterStep
from pliant.methods._core.attachment import Attachment, check_rates, count_step, found_inf_of
from pliant.methods._core.method import Filter, Receipt
from pliant.methods._core.naming import check_modules
from pliant.methods._core.pull import DevicePull, HostPull, rows_that_follow
from pliant.methods._core.selection import check_not_frozen
from pliant.methods._core.strengths import Strength, resolve_strengths

OnDecay = Literal["keep", "reinit"]
_PullKey = tuple[tuple[str, ...], tuple[int, ...], int, int]
"""Names of the parameters that are stepped, rows of what is frozen, and the versions of λ and of the initial norms."""


class SWR(AfterStep):
    """Keep weights near their initial norms; the network's output is only multiplied by a constant.

    Args:
        model: The model; its present weight norms are ‖W₀‖.
        example: An example input (tensor, tuple of arguments or dictionary of keyword arguments), on which the model
            is analyzed. Not needed if `order` lists the layers.
        lam: λ in [0, 1], one for all weights or by name pattern (packed queries, keys and values go by the name of
            their parameter, or each by its own); the paper's λ_f if `lam_classifier` is given.
        lam_classifier: The paper's λ_c, the classifier's strength; `lam` if None.
        classifier: The classifier's modules by name; the fully connected tail (the last layer of an MLP; of several
            heads the one called last) if None.
        order: "graph" analyses how the parameters' scales hang together, for any architecture, and pulls each weight
            as near to its wish as the function allows. "forward" takes the layers in order of their call as a chain,
            whatever joins them; a list of module names is an explicit chain, and leaves all else alone.
        mode: "exact" keeps the function; "paper" is Algorithm 1 with its erratum mended, which is for chains: the
            layers in the order of their call, or as listed.
        approximate: Activations that are not homogeneous but to be treated as if they were, e.g. {"gelu", "silu"}; the
            receipt tells the drift. By default their input keeps its scale, and the function is kept.
        on_conflict: What to do where keeping the function forbids a weight its wish (queries and keys before a
            softmax): "preserve" the function or "rescale" all the same.
        coupled: Let λ follow the learning rate: λ·lr/lr₀, but not beyond 1. lr₀ is the group's `initial_lr` if a
            scheduler set one, else the rate at attachment; if that is 0 (a warm-up), the first rate above 0.
        on_decay: "reinit" makes the present norms the initial ones when a learning rate drops to half or less from one
            step to the next: a step decay, or the start of a new warm-up. A smooth schedule never does it: once a rate
            has begun to fall by less, drops do not count until it has risen again.
        every: Act only on every n-th step.
        where: Which weights to pull; all if None. Biases, and weights that must follow, are written all the same.

    A factor closer to 1 than the weights' precision is lost to rounding: in bfloat16, where λ(1 − ‖W₀‖/‖W‖) < 2⁻⁹,
    nothing happens. Keep such weights in float32 (as autocast does), or act seldom and strongly.
    """

    name = "swr"
    saved: ClassVar[tuple[str, ...]] = ("initial_norms", "base_lr", "last_lr", "declines")
    pins_placement: ClassVar[bool] = True
    joint: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        lam: Strength = 1e-3,
        lam_classifier: float | None = None,
        classifier: Sequence[str] | None = None,
        order: Literal["graph", "forward"] | Sequence[str] = "graph",
        mode: Mode = "exact",
        approximate: Collection[str] = frozenset(),
        on_conflict: OnConflict = "preserve",
        coupled: bool = False,
        on_decay: OnDecay = "keep",
        every: int = 1,
        where: Filter | None = None,
    ) -> None:
        check_choice("mode", mode, get_args(Mode))
        check_choice("on_decay", on_decay, get_args(OnDecay))
        check_choice("on_conflict", on_conflict, get_args(OnConflict))
        super().__init__(model)
        self.coupled = coupled
        self.drifts = bool(approximate) or on_conflict == "rescale"
        self.on_decay = on_decay
        self.every = check_positive_int("every", every)
        self._scales: ScaleGraph | None = None
        if isinstance(order, str):
            check_choice("order", order, ("graph", "forward"))
            if example is None:
                raise ValueError("example: None; pass an example input, or list the layers with order=[module names]")
        if order == "graph" and mode == "exact":
            try:
                self._scales = analyze(model, example, approximate=approximate, on_conflict=on_conflict)
            except ExampleError:
                raise
            except GraphError as error:
                ways = (
                    'order="forward" (the layers in order of their call, as a chain) and a list of layers need no graph'
                )
                raise GraphError(f"{error} With SWR, {ways}.") from error
            self.plan = self._scales.plan()
            self._warn_of_loss(self._scales)
        else:
            if self.drifts:
                raise ValueError(
                    "approximate, on_conflict: they are for order='graph' with mode='exact'; in a chain every "
                    "activation is taken for homogeneous"
                )
            self.plan = chain_plan(_chain(model, example, order), mode)
        if lam_classifier is None and classifier is not None:
            raise ValueError(f"classifier: {classifier!r} means nothing without lam_classifier, its strength")
        if not self.plan.wishes:
            raise ValueError(
                "model: no weight can be rescaled without changing the function; see pliant.anatomy.analyze"
            )
        self._block_names = [str(block) for block in self.plan.wishes]
        self._wished = BlockTensors(model, self.plan.wishes)
        self._written = BlockTensors(model, self.plan.targets)
        self._written_parameters = self._written.parameters()
        self._pulls: dict[_PullKey, DevicePull | HostPull] = {}
        self._dtype = torch.float32
        for tensor in self._wished.get():
            self._dtype = torch.promote_types(self._dtype, tensor.dtype)
        self.initial_norms = self._norms()
        names_of = {id(p): name for name, p in self.parameters.items()}
        self._parameter_names = [names_of[id(model.get_parameter(block.name))] for block in self.plan.wishes]
        if lam_classifier is not None and classifier is None:
            classifier = classifier_names(
                _chain(model, example, order) if example is None else called_layers(model, example)
            )
        owned = [(owner, self.parameters[owner]) for owner in self._parameter_names]
        self._chosen = torch.tensor([where is None or bool(where(name, parameter)) for name, parameter in owned])
        if not self._chosen.any():
            raise ValueError(f"where: it passes none of the weights that can be pulled: {', '.join(self._block_names)}")
        self.lam = torch.tensor(self._strengths(lam, lam_classifier, classifier), dtype=torch.float64) * self._chosen
        self._warn_of_zero_weights()
        self.base_lr = torch.full((len(self._block_names),), torch.nan, dtype=torch.float64)
        self.last_lr = torch.full((len(self._block_names),), torch.nan, dtype=torch.float64)
        self.declines = torch.zeros(len(self._block_names), dtype=torch.bool)
        self._last: Tensor | Sequence[float] | None = None

    def attach(self, *optimizers: Optimizer) -> Self:
        """Rescale after every step of these optimizers, each time the weights that the optimizer holds."""
        super().attach(*optimizers)
        for optimizer in optimizers:
            self._note_rates(optimizer)
        if not any(owner in a.names for a in self._attachments.values() for owner in self._parameter_names):
            warn_user(
                f"swr pulls none of the parameters that its optimizers hold; it pulls {', '.join(self._block_names)}"
            )
        return self

    def step(self) -> None:
        """Rescale once, all weights; with `coupled` those that an attached optimizer holds by its learning rate."""
        count_step(self.steps)
        rates = torch.ones_like(self.base_lr)
        for optimizer in self.optimizers if self.coupled else ():
            held = ~self._learning_rates(optimizer).isnan()
            rates = torch.where(held, self._relative_rates(optimizer), rates)
        self._last = self._rescale(tuple(self.parameters), rates if self.coupled else None)

    def reset_initial_norms(self) -> None:
        """Make the present norms the initial ones: call it when the learning rate decays (SWR + re-init)."""
        self._reset_initial_norms(torch.ones_like(self.lam, dtype=torch.bool))

    def explain(self) -> str:
        """Return a table of what each parameter's scale follows from, and what forced it; order="graph" only."""
        return self._graph().explain()

    @torch.no_grad()
    def measure_drift(self) -> dict[str, float]:
        """Return how far one rescaling moves each output from being proportional, on the example; order="graph" only.

        The distance is relative to the output's largest entry. The parameters are left as they are.
        """
        scales = self._graph()
        written = self._written.get()
        kept = torch._foreach_clone(written)
        before = run_graph(scales.graph, {})
        try:
            factors = self._output_factors(self._rescale(tuple(self.parameters)))
            return drift(scales.graph, before, dict(zip(scales.system.outputs, factors, strict=True)))
        finally:
            torch._foreach_copy_(written, kept)

    @property
    def receipt(self) -> Receipt | None:
        """The factors of the weights and of the output at the last rescaling, and the norms' growth until now."""
        if self._last is None:
            return None
        growth = self._norms() / self.initial_norms
        details = {
            "factors": dict(zip(self._block_names, self._factors(self._last), strict=True)),
            "output_factors": self._output_factors(self._last),
            "norm_growth": dict(zip(self._block_names, growth.tolist(), strict=True)),
            "steps": sum(self.steps),
        }
        if self.drifts and self._scales is not None and all(p.requires_grad for _, p in self._written_parameters):
            details["drift"] = self.measure_drift()
        tensors, rows = self._written.get(), rows_that_follow(self.plan.matrix, _as_tensor(self._last) != 0)
        names = {self.plan.targets[row].name for row in rows}  # packed ones have several blocks
        return Receipt(self.name, "rescale", len(names), sum(tensors[row].numel() for row in rows), details)

    @property
    def lam(self) -> Tensor:
        """λ of each weight; assign a tensor, or a number for all that `where` passes, or change it in place."""
        return self._lam

    @lam.setter
    def lam(self, lam: Tensor | float) -> None:
        lam = torch.as_tensor(lam).to(self._initial_norms)
        if lam.ndim == 0:
            lam = lam * self._chosen.to(lam.device)
        self._lam = _own(_checked("lam", lam, len(self._block_names), high=1.0))
        self._pulls.clear()

    @property
    def initial_norms(self) -> Tensor:
        """‖W₀‖ of each weight that is pulled; assign a tensor, or change it in place."""
        return self._initial_norms

    @initial_norms.setter
    def initial_norms(self, norms: Tensor | Sequence[float]) -> None:
        norms = torch.as_tensor(norms, dtype=self._dtype, device=self._wished.get()[0].device)
        self._initial_norms = _own(_checked("initial_norms", norms, len(self._block_names)))
        self._pulls.clear()

    def _strengths(self, lam: Strength, lam_classifier: float | None, classifier: Sequence[str] | None) -> list[float]:
        """Return λ of each weight, `where` left aside."""
        wholes = {str(block): block.name for block in self.plan.wishes}
        strengths = resolve_strengths(lam, self._block_names, high=1.0, wholes=wholes)
        if lam_classifier is not None and classifier is not None:
            check_number("lam_classifier", lam_classifier, high=1.0)
            modules = [self.model.get_submodule(name) for name in check_modules("classifier", self.model, classifier)]
            held = {id(parameter) for module in modules for parameter in module.parameters()}
            owned = zip(self._block_names, self._parameter_names, strict=True)
            chosen = [name for name, owner in owned if id(self.parameters[owner]) in held]
            if not chosen:
                raise ValueError(
                    f"classifier: {', '.join(map(repr, classifier))} has none of the weights that can be pulled: "
                    f"{', '.join(self._block_names)}"
                )
            strengths |= dict.fromkeys(chosen, lam_classifier)
        return [strengths.get(name, 0.0) for name in self._block_names]

    def _factors(self, log_c: Tensor | Sequence[float]) -> list[float]:
        """Return what each weight was multiplied by: where others hang on it, not what it wished for."""
        rows = {block: row for row, block in enumerate(self.plan.targets)}
        scales: Tensor = (self.plan.matrix @ _as_tensor(log_c)).exp()
        return [float(scales[rows[block]]) for block in self.plan.wishes]

    def _output_factors(self, log_c: Tensor | Sequence[float]) -> list[float]:
        factors: list[float] = (self.plan.outputs @ _as_tensor(log_c)).exp().tolist()
        return factors

    def _acted_on(self) -> list[nn.Parameter]:
        return [self.parameters[owner] for owner, lam in zip(self._parameter_names, self.lam, strict=True) if lam > 0]

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        handles = super()._register_hooks(optimizer)
        if self.on_decay == "reinit":
            handles.append(before_step(optimizer, self._before_step))
        return handles

    def _match_again(self, optimizer: Optimizer, attachment: Attachment) -> None:
        super()._match_again(optimizer, attachment)
        self._note_rates(optimizer)

    def _match(self, optimizer: Optimizer) -> Attachment:
        if self.coupled or self.on_decay == "reinit":
            check_rates(optimizer, "coupled=True and on_decay='reinit' follow it")
        return super()._match(optimizer)

    def _note_rates(self, optimizer: Optimizer) -> None:
        groups, rates = optimizer.param_groups, self._learning_rates(optimizer)
        base = self._per_wish(optimizer, [group.get("initial_lr", group.get("lr")) for group in groups])
        self.base_lr = torch.where(self.base_lr.isnan(), base, self.base_lr)
        self.last_lr = torch.where(self.last_lr.isnan(), rates, self.last_lr)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        rates = self._learning_rates(optimizer)
        fell = (rates <= self.last_lr / 2) & ~self.declines
        if fell.any():
            self._reset_initial_norms(fell)
        # A smooth decline falls to half from one step to the next too, when it comes close to zero.
        self.declines |= (rates < self.last_lr * (1 - 1e-6)) & ~fell  # and not by rounding alone
        self.declines &= ~(rates > self.last_lr)
        self.last_lr = torch.where(rates.isnan(), self.last_lr, rates)

    def _act(self, optimizer: Optimizer, attachment: Attachment) -> None:
        if not any(owner in attachment.names for owner in self._parameter_names):
            return  # it pulls nothing (one for the biases): the receipt stays that of the last rescaling
        rates = self._relative_rates(optimizer) if self.coupled else None
        self._last = self._rescale(attachment.names, rates, found_inf_of(optimizer))

    @torch.set_grad_enabled(False)  # Cheaper than no_grad, where every microsecond counts.
    def _rescale(
        self, names: tuple[str, ...], rates: Tensor | None = None, found_inf: Tensor | None = None
    ) -> Tensor | Sequence[float]:
        frozen = tuple([row for row, parameter in self._written_parameters if not parameter.requires_grad])
        key = (names, frozen, self._lam._version, self._initial_norms._version)
        pull = self._pulls.get(key) or self._make_pull(key)
        norms = torch._foreach_norm(self._wished.get(), 2, self._dtype)
        return pull(norms, self._written.get(), rates, found_inf)

    def _make_pull(self, key: _PullKey) -> DevicePull | HostPull:
        self._pulls = {other: pull for other, pull in self._pulls.items() if other[2:] == key[2:]}
        for name, values, high in (("lam", self._lam, 1.0), ("initial_norms", self._initial_norms, torch.inf)):
            _checked(name, values, len(self._block_names), high)  # they may have been changed in place
        held = set(key[0])
        free = [owner in held and self.parameters[owner].requires_grad for owner in self._parameter_names]
        lam = self.lam * self.lam.new_tensor(free) * (self.initial_norms > 0)
        rows = rows_that_follow(self.plan.matrix, lam > 0)
        check_not_frozen(
            self.name, [(str(self.plan.targets[row]), p) for row, p in self._written_parameters if row in rows]
        )
        pull_class = HostPull if lam.device.type == "cpu" else DevicePull
        pull = pull_class(self.initial_norms, lam, self.plan.matrix, rows)
        return self._pulls.setdefault(key, pull)

    @torch.no_grad()
    def _norms(self) -> Tensor:
        return torch.stack(torch._foreach_norm(self._wished.get(), 2, self._dtype))

    def _reset_initial_norms(self, chosen: Tensor) -> None:
        norms = self._norms()
        self.initial_norms = torch.where(chosen.to(norms.device) & (norms > 0), norms, self.initial_norms)

    def _relative_rates(self, optimizer: Optimizer) -> Tensor:
        """Return lr/lr₀ of each weight; 0 where the optimizer does not hold it."""
        rates = self._learning_rates(optimizer)
        # A rate that was zero at attachment is none to compare with: the first one that is not takes its place.
        self.base_lr = torch.where((rates > 0) & ~(self.base_lr > 0), rates, self.base_lr)
        return (rates / self.base_lr).nan_to_num(0.0)

    def _learning_rates(self, optimizer: Optimizer) -> Tensor:
        return self._per_wish(optimizer, [group.get("lr") for group in optimizer.param_groups])

    def _per_wish(self, optimizer: Optimizer, values: Sequence[float | None]) -> Tensor:
        """Return the value of each weight's parameter group; nan where there is none, or no such weight."""
        attachment = self._attachment(optimizer)
        groups = dict(zip(attachment.names, attachment.groups, strict=True))
        found = [values[groups[owner]] if owner in groups else None for owner in self._parameter_names]
        return torch.tensor([torch.nan if value is None else float(value) for value in found], dtype=torch.float64)

    def _graph(self) -> ScaleGraph:
        if self._scales is None:
            raise ValueError(
                "order: only order='graph' with mode='exact' has a graph, and a copy of a method has none; "
                "make a new method"
            )
        return self._scales

    def __getstate__(self) -> dict[str, Any]:
        # The traced graph belongs to the model that it was traced from.
        return {**super().__getstate__(), "_scales": None}

    def _warn_of_loss(self, scales: ScaleGraph) -> None:
        graph = scales.graph
        inputs = (value for value in graph.inputs.values() if isinstance(value, Tensor) and value.ndim > 1)
        samples = max(map(len, inputs), default=1)
        single = [
            name
            for name, node in graph.outputs.items()
            if not graph.shape(node) and graph.is_learned(node) and (samples > 1 or "loss" in name)
        ]
        if single:
            warn_user(
                f"example: with it {type(self.model).__name__} returns a single number ({', '.join(single)}), a loss? "
                "Its scale would be kept, and with it that of what it is computed from; leave the labels out"
            )

    def _warn_of_zero_weights(self) -> None:
        zero = (self.initial_norms == 0).tolist()
        names = [name for name, is_zero in zip(self._block_names, zero, strict=True) if is_zero]
        if names:
            warn_user(f"swr does not pull these weights, they start as all zero: {', '.join(names)}")


def _chain(model: nn.Module, example: Any, order: str | Sequence[str]) -> tuple[Layer, ...]:
    if isinstance(order, str):
        return chain_layers(model, called_layers(model, example))
    return tuple(Layer(name, model.get_submodule(name)) for name in check_modules("order", model, order))


def _checked(argument: str, values: Tensor, count: int, high: float = torch.inf) -> Tensor:
    """Return values that are one for each weight and in range; a norm that is NaN is none that can be compared."""
    if values.shape != (count,):
        raise ValueError(f"{argument}: its shape is {tuple(values.shape)}; it must be ({count},), one for each weight")
    if (values < 0).any() or (values > high).any() or (high < torch.inf and values.isnan().any()):
        raise ValueError(f"{argument}: {values.tolist()} is not allowed; it must be from 0 to {high:g}")
    return values


def _own(tensor: Tensor) -> Tensor:
    """Return a copy that nobody else writes to, and that counts its versions."""
    with torch.inference_mode(False):
        return tensor.detach().clone()


def _as_tensor(log_c: Tensor | Sequence[float]) -> Tensor:
    return torch.as_tensor(log_c, dtype=torch.float64, device="cpu")
