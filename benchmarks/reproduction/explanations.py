"""Which measures separate networks that lost plasticity from networks that kept it."""

from benchmarks.reproduction.kept import FEWEST, NOTHING, Estimate, estimate, load_kept
from pliant.diagnostics import measures
from pliant.experiments.report.formatting import join_names

KEPT_BELOW = 0.05
"""The growth of the training error up to which plasticity counts as kept: the margin of claims/P3.toml."""


def explanations_block(name: str) -> str:
    """Sort the measures of an experiment by whether their change separates lost from kept plasticity.

    A network lost plasticity if the whole 95 % interval of the growth of its training error is above 0.05, and kept it
    if the whole interval is below. Other networks, and those that diverged, are left out.
    """
    kept = load_kept(name)
    if kept is None:
        return NOTHING
    values = {label: kept.values(label, "train_error_growth").values() for label in kept.labels}
    growth = {
        label: estimate(found)
        for label, found in values.items()
        if found and not kept.diverged(label, "train_error_growth")
    }
    lost = [label for label, found in growth.items() if found.low > KEPT_BELOW]
    remained = [label for label, found in growth.items() if found.high < KEPT_BELOW]
    if not lost or not remained:
        return "No network is known to have lost plasticity, or none to have kept it: there is nothing to compare."
    told: dict[str, list[str]] = {}
    for measure in measures.names():
        changes = {label: kept.values(label, f"{measure}_change").values() for label in (*lost, *remained)}
        if not any(changes.values()):
            continue
        enough = all(len(values) >= FEWEST for values in changes.values())
        found = {label: estimate(values) for label, values in changes.items()} if enough else {}
        verdict = separates([found[one] for one in lost], [found[one] for one in remained]) if found else "no change"
        told.setdefault(verdict, []).append(f"`{measure}`")
    words = {
        "lower": f"falls more, or rises less, in networks that lost it ({join_names(lost)}) than in networks that kept "
        f"it ({join_names(remained)})",
        "higher": "rises more, or falls less, in networks that lost it",
        "neither": "does not separate them",
        "no change": "is not defined for all of them, or starts from zero",
    }
    unknown = [label for label in kept.labels if label not in (*lost, *remained)]
    left = [f"- (the runs do not show whether {join_names(unknown)} kept it)"] if unknown else []
    return "\n".join(
        left + [f"- {words[verdict]}: {join_names(told[verdict])}" for verdict in words if verdict in told]
    )


def separates(lost: list[Estimate], remained: list[Estimate]) -> str:
    """Return whether all intervals of the lost networks are below or above all intervals of the others.

    Example:
        >>> fallen, steady = Estimate(-0.9, 0.1, 5), Estimate(0.0, 0.1, 5)
        >>> separates([fallen], [steady]), separates([steady], [fallen]), separates([fallen, steady], [steady])
        ('lower', 'higher', 'neither')
    """
    if max(one.high for one in lost) < min(one.low for one in remained):
        return "lower"
    return "higher" if min(one.low for one in lost) > max(one.high for one in remained) else "neither"
