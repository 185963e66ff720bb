"""Soft weight rescaling: after every step, pull each weight's norm toward its initial norm, and keep predictions.

Paper: "Recovering Plasticity of Neural Networks via Soft Weight Rescaling", §3 and Algorithm 1. Each weight is to be
multiplied by c = (λ‖W₀‖ + (1−λ)‖W‖) / ‖W‖. The other parameters follow, so that the network's output is only multiplied
by a constant (docs/proportionality.md). λ = 1 is hard rescaling.

Where we deviate. Algorithm 1 as printed scales the final norm layer's shift by one factor too many; both modes of the
plan fix that. The default plan also scales a bias between two norm layers by the product since the last one, and moves
batch norm's running statistics with their input; otherwise the function would change. `plan={"mode": "paper"}` does
neither. `schedule="coupled"` is ours; `schedule="reinit"` is the paper's answer to learning rate decay (appendix E).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._names import check_names, keyword_options
from pliant._step_hooks import before_step
from pliant._validation import check_number, check_positive_int
from pliant._warnings import warn_user
from pliant.anatomy.layers import classifier_parameters
from pliant.anatomy.plan import BlockTensors, ScalePlan
from pliant.anatomy.planning import plan_rescaling
from pliant.anatomy.verify import drift, run_graph
from pliant.distributed import Group, whole_norms
from pliant.methods._core import host
from pliant.methods._core.after_step import AfterStep
from pliant.methods._core.attachment import Attachment, count_step, found_inf_of
from pliant.methods._core.filters import Filter, Strength, check_not_frozen, resolve_strengths
from pliant.methods._core.learning_rate import LearningRateSchedule, Schedule
from pliant.methods._core.method import Receipt
from pliant.methods._core.on_ranks import Sharding

Number = TypeVar("Number", float, Tensor)
LogFactors = Tensor | Sequence[float]


def rescaling_factor(norm: Number, initial_norm: Number, lam: Number) -> Number:
    """Return c = (λ‖W₀‖ + (1−λ)‖W‖) / ‖W‖.

    Args:
        norm: ‖W‖.
        initial_norm: ‖W₀‖.
        lam: λ in [0, 1].

    Example:
        >>> rescaling_factor(2.0, 1.0, 0.5)
        0.75
    """
    return (lam * initial_norm + (1 - lam) * norm) / norm


class SWR(AfterStep):
    """Keep weights near their initial norms; the network's output is only multiplied by a constant.

    Args:
        model: The model; its present weight norms are ‖W₀‖.
        example: An example input (tensor, tuple of arguments or dictionary of keyword arguments), on which the model
            is analyzed. Not needed if `plan` is a made plan or lists the layers.
        lam: λ in [0, 1], one for all weights or by name pattern. A pattern for a packed parameter (queries, keys and
            values) holds for each of its parts, unless an earlier pattern names the part.
        lam_classifier: λ of the classifier, the fully connected tail (the last layer of an MLP); `lam` if None.
        plan: Which parameters follow which weight: a plan made by `pliant.anatomy.plan_rescaling`, or a mapping of its
            options, such as {"mode": "paper"}. By default, the plan that keeps the function exactly.
        schedule: "constant" λ; "coupled", λ·lr/lr₀ but at most 1; or "reinit": when the learning rate drops to half or
            less from one step to the next, the present norms become the initial ones.
        every: Act only on every n-th step.
        where: Which weights to pull; all if None. Parameters that must follow are written all the same.

    In bfloat16, where λ(1 − ‖W₀‖/‖W‖) < 2⁻⁹, factors round to 1 and nothing happens. Keep such weights in float32 (as
    autocast does), or act seldom and strongly.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> swr = SWR(model, torch.ones(1, 2), lam=0.5)
        >>> _ = model.weight.data.mul_(2)
        >>> swr.step()
        >>> round(swr.receipt.details["factors"]["weight"], 4)
        0.75
    """

    name = "swr"
    sharding: Sharding = "norms"
    saved: ClassVar[tuple[str, ...]] = ("initial_norms",)
    pins_placement: ClassVar[bool] = True
    joint: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        lam: Strength = 1e-3,
        lam_classifier: float | None = None,
        plan: ScalePlan | Mapping[str, Any] | None = None,
        schedule: Schedule = "constant",
        every: int = 1,
        where: Filter | None = None,
    ) -> None:
        super().__init__(model)
        self.every = check_positive_int("every", every)
        if not isinstance(plan, ScalePlan):
            check_names("plan", plan or {}, keyword_options(plan_rescaling))
            plan = plan_rescaling(model, example, **(plan or {}))
        self.plan = plan
        if not self.plan.wishes:
            raise ValueError(
                "model: no weight can be rescaled without changing the function; see pliant.anatomy.analyze"
            )
        if any(block.start is not None for block in (*self.plan.wishes, *self.plan.targets)):
            self.sharding = "whole"  # a shard may cut through packed queries, keys and values
        self._weights = BlockTensors(model, self.plan.wishes)
        self._written = BlockTensors(model, self.plan.targets)
        self._written_parameters = self._written.parameters()
        self._weight_names = [str(block) for block in self.plan.wishes]
        names_of = {id(p): name for name, p in self.parameters.items()}
        self._parameter_names = [names_of[id(model.get_parameter(block.name))] for block in self.plan.wishes]
        self._dtype = torch.float32
        for tensor in self._weights.get():
            self._dtype = torch.promote_types(self._dtype, tensor.dtype)
        self._on_host = host.is_on_host(self._weights.get()[0])
        self._rules: dict[tuple[tuple[str, ...], tuple[int, ...]], tuple[list[int], FactorRule]] = {}
        self.initial_norms = self._norms()
        self.lam = torch.tensor(self._resolve(lam, lam_classifier, example, where), dtype=torch.float64)
        zero = [name for name, norm in zip(self._weight_names, self.initial_norms.tolist(), strict=True) if norm == 0]
        if zero:
            warn_user(f"swr does not pull these weights, because they start at zero: {', '.join(zero)}")
        self.schedule = LearningRateSchedule(schedule, self._parameter_names)
        self._last: LogFactors | None = None

    def attach(self, *optimizers: Optimizer, group: Group | None = None) -> Self:
        """Rescale after every step of these optimizers, each time the weights that the optimizer holds."""
        super().attach(*optimizers, group=group)
        if not any(owner in a.names for a in self._attachments.values() for owner in self._parameter_names):
            warn_user(
                f"swr pulls none of the parameters that its optimizers hold, only {', '.join(self._weight_names)}"
            )
        return self

    def step(self) -> None:
        """Rescale all weights once; with schedule="coupled" by the learning rates of the attached optimizers."""
        count_step(self.steps)
        rates = None
        if self.schedule.kind == "coupled":
            attached = [(optimizer, self._attachment(optimizer)) for optimizer in self.optimizers]
            rates = self.schedule.factors(attached, otherwise=1.0)
        self._last = self._rescale(tuple(self.parameters), rates)

    def reset_initial_norms(self, chosen: Tensor | None = None) -> None:
        """Make the present norms the initial ones, as schedule="reinit" does when the learning rate decays.

        Args:
            chosen: For each weight whether to do so; all if None. A weight of zeros keeps its initial norm.
        """
        norms = self._norms()
        chosen = (norms > 0) & (True if chosen is None else chosen.to(norms.device))
        self.initial_norms = torch.where(chosen, norms, self.initial_norms)

    @property
    def initial_norms(self) -> Tensor:
        """‖W₀‖ of each weight; assign a new tensor to change it."""
        return self._initial_norms

    @initial_norms.setter
    def initial_norms(self, norms: Tensor) -> None:
        self._initial_norms = norms
        self._rules.clear()

    @property
    def lam(self) -> Tensor:
        """λ of each weight; assign a new tensor to change it."""
        return self._lam

    @lam.setter
    def lam(self, lam: Tensor) -> None:
        for strength in lam.tolist():
            check_number("lam", strength, high=1.0)
        self._lam = lam
        self._rules.clear()

    def explain(self) -> str:
        """Return a table of what each parameter's scale follows from, and what forced it."""
        return self.plan.analyzed().explain()

    @torch.no_grad()
    def measure_drift(self) -> dict[str, float]:
        """Return how far one rescaling moves each output from being proportional, on the example.

        The distance is relative to the output's largest entry. The parameters keep their values.
        """
        scales = self.plan.analyzed()
        written = self._written.get()
        kept = torch._foreach_clone(written)
        before = run_graph(scales.graph, {})
        try:
            factors = self._factors(self.plan.outputs, self._rescale(tuple(self.parameters)))
            return drift(scales.graph, before, dict(zip(scales.system.outputs, factors, strict=True)))
        finally:
            torch._foreach_copy_(written, kept)

    @property
    def receipt(self) -> Receipt | None:
        """The factors of the weights and of the output at the last rescaling, and the norms' growth until now."""
        if self._last is None:
            return None
        scales = dict(zip(self.plan.targets, self._factors(self.plan.matrix, self._last), strict=True))
        growth = (self._norms() / self.initial_norms).tolist()
        details = {
            "factors": {str(block): scales[block] for block in self.plan.wishes},
            "output_factors": self._factors(self.plan.outputs, self._last),
            "norm_growth": dict(zip(self._weight_names, growth, strict=True)),
            "steps": sum(self.steps),
        }
        if self.plan.drifts and self.plan.graph and all(p.requires_grad for _, p in self._written_parameters):
            details["drift"] = self.measure_drift()
        tensors, rows = self._written.get(), self.plan.rows_that_follow(_as_tensor(self._last) != 0)
        names = {self.plan.targets[row].name for row in rows}  # a packed parameter has several blocks
        return Receipt(self.name, "rescale", len(names), sum(tensors[row].numel() for row in rows), details)

    def _resolve(self, lam: Strength, lam_classifier: float | None, example: Any, where: Filter | None) -> list[float]:
        """Return λ of each weight."""
        passed = [where is None or where(name, self.parameters[name]) for name in self._parameter_names]
        if not any(passed):
            raise ValueError(
                f"where: it selects none of the weights that swr can pull: {', '.join(self._weight_names)}"
            )
        wholes = {str(block): block.name for block in self.plan.wishes}
        strengths = resolve_strengths(lam, self._weight_names, high=1.0, wholes=wholes)
        if lam_classifier is not None:
            check_number("lam_classifier", lam_classifier, high=1.0)
            if example is None:
                raise ValueError(
                    "lam_classifier: the classifier is found on an example, which is None; use lam patterns"
                )
            tail = classifier_parameters(self.model, example)
            for name, owner in zip(self._weight_names, self._parameter_names, strict=True):
                if id(self.parameters[owner]) in tail:
                    strengths[name] = lam_classifier
        return [strengths.get(name, 0.0) * ok for name, ok in zip(self._weight_names, passed, strict=True)]

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        handles = super()._register_hooks(optimizer)
        return [*handles, before_step(optimizer, self._before_step)] if self.schedule.kind == "reinit" else handles

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        decays = self.schedule.find_decays(optimizer, self._attachment(optimizer))
        if decays.any():
            with self._acting():
                self.reset_initial_norms(decays)

    def _act(self, optimizer: Optimizer, attachment: Attachment) -> None:
        if any(owner in attachment.names for owner in self._parameter_names):
            coupled = self.schedule.kind == "coupled"
            rates = self.schedule.factors([(optimizer, attachment)], otherwise=0.0) if coupled else None
            self._last = self._rescale(attachment.names, rates, found_inf_of(optimizer))

    @torch.set_grad_enabled(False)  # cheaper than no_grad
    def _rescale(
        self, names: tuple[str, ...], rates: Tensor | None = None, found_inf: Tensor | None = None
    ) -> LogFactors:
        """Rescale the weights among these parameters, and what follows them; return log c of each weight."""
        frozen = tuple([row for row, parameter in self._written_parameters if not parameter.requires_grad])
        rows, rule = self._rules.get((names, frozen)) or self._make_rule(names, frozen)
        log_c, factors = rule(self._block_norms(), rates, found_inf)
        if rows:
            written = self._written.get()
            torch._foreach_mul_([written[row] for row in rows], factors)  # type: ignore[arg-type]
        return log_c

    def _make_rule(self, names: tuple[str, ...], frozen: tuple[int, ...]) -> tuple[list[int], "FactorRule"]:
        free = [name in names and self.parameters[name].requires_grad for name in self._parameter_names]
        lam = self.lam * torch.tensor(free) * (self.initial_norms > 0).cpu()
        rows = self.plan.rows_that_follow(lam > 0)
        check_not_frozen(
            self.name, [(str(self.plan.targets[row]), p) for row, p in self._written_parameters if row in rows]
        )
        rule = FactorRule(self.initial_norms, lam, self.plan.matrix[rows], on_host=self._on_host)
        return self._rules.setdefault((names, frozen), (rows, rule))

    @torch.no_grad()
    def _norms(self) -> Tensor:
        return torch.stack(self._block_norms())

    def _block_norms(self) -> list[Tensor]:
        norms = torch._foreach_norm(self._weights.get(), 2, self._dtype)
        return whole_norms(norms, [self.parameters[name] for name in self._parameter_names])

    @staticmethod
    def _factors(matrix: Tensor, log_c: LogFactors) -> list[float]:
        factors: list[float] = (matrix @ _as_tensor(log_c)).exp().tolist()
        return factors

    def _acted_on(self) -> list[nn.Parameter]:
        return [self.parameters[name] for name, lam in zip(self._parameter_names, self.lam, strict=True) if lam > 0]

    def __getstate__(self) -> dict[str, Any]:
        # The traced graph belongs to the model that it was traced from.
        return {**super().__getstate__(), "plan": replace(self.plan, graph=None)}


class FactorRule:
    """Maps the norms of weights to log c and to the factors of the tensors to write.

    A network has few weights, so the cost is the number of calls. On the host Python's floats save the calls of small
    tensor operations, about 5% of a training step of a small network. On a device nothing waits for the result.

    Args:
        initial_norms: ‖W₀‖ of each weight.
        lam: λ of each weight.
        matrix: Maps log c of the weights to the log-factor of each tensor to write.
        on_host: Whether to compute with Python's floats, not with tensors.
    """

    def __init__(self, initial_norms: Tensor, lam: Tensor, matrix: Tensor, *, on_host: bool) -> None:
        wide = initial_norms.to(torch.float32 if initial_norms.device.type == "mps" else torch.float64)
        self._initial_norms, self._lam, self._matrix = wide, lam.to(wide), matrix.to(wide)
        if on_host:
            self._floats = list(zip(wide.tolist(), lam.tolist(), strict=True))
            self._rows = [[(j, entry) for j, entry in enumerate(row) if entry] for row in matrix.tolist()]
        self._on_host = on_host

    def __call__(
        self, norms: Sequence[Tensor], rates: Tensor | None, found_inf: Tensor | None
    ) -> tuple[LogFactors, Sequence[float] | Sequence[Tensor]]:
        """Return log c of each weight and the factor of each tensor.

        Args:
            norms: ‖W‖ of each weight. A weight that is all zero or not finite gets c = 1.
            rates: A factor of each λ, None for 1. The product is at most 1.
            found_inf: Not zero if the optimizer skipped its step: then all factors are 1.
        """
        if not self._on_host:
            lam = self._lam if rates is None else (self._lam * rates.to(self._lam)).clamp_max_(1)
            c = rescaling_factor(torch.stack(list(norms)).to(lam), self._initial_norms, lam)
            logs = c.log_().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            logs = logs if found_inf is None else torch.where(found_inf == 0, logs, 0)
            # not `mv`, which autocast would compute in half precision
            return logs, (self._matrix * logs).sum(1).exp_().unbind()
        if found_inf is not None and found_inf.item():
            return [0.0] * len(norms), [1.0] * len(self._rows)
        log_c = []
        for i, (initial_norm, lam_i) in enumerate(self._floats):
            norm = norms[i].item()
            strength = lam_i if rates is None else min(lam_i * rates[i].item(), 1.0)
            c_i = rescaling_factor(norm, initial_norm, strength) if norm else 1.0
            log_c.append(math.log(c_i) if 0.0 < c_i < math.inf else 0.0)
        return log_c, [math.exp(sum([entry * log_c[j] for j, entry in row])) for row in self._rows]


def _as_tensor(log_c: LogFactors) -> Tensor:
    return torch.as_tensor(log_c, dtype=torch.float64, device="cpu")
