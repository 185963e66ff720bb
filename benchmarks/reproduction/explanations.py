"""Which measures tell networks that lost plasticity from networks that kept it."""

from benchmarks.reproduction.kept import FEWEST, NOTHING, Estimate, estimate, load_kept
from pliant.diagnostics import measures
from pliant.experiments.report.formatting import join_names

KEPT_BELOW = 0.05
"""How far the training error may grow where plasticity counts as kept: the margin of claims/P3.toml."""


def explanations_block(name: str) -> str:
    """Sort the measures of an experiment by whether their change goes with the loss of plasticity.

    A network lost plasticity if the whole 95 % interval of the growth of its training error lies above 0.05, and kept
    it if all of that lies below; of the others, and of one that diverged, nothing is said.
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
        return "No two networks are known to have fared differently: there is nothing to tell apart."
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
        "lower": f"falls more, or rises less, in those that lost it ({join_names(lost)}) than in those that kept it "
        f"({join_names(remained)})",
        "higher": "rises more, or falls less, in those that lost it",
        "neither": "does not tell them apart",
        "no change": "is not defined for all of them, or starts from zero",
    }
    unknown = [label for label in kept.labels if label not in (*lost, *remained)]
    left = [f"- (of {join_names(unknown)} the runs do not tell whether it was kept)"] if unknown else []
    return "\n".join(
        left + [f"- {words[verdict]}: {join_names(told[verdict])}" for verdict in words if verdict in told]
    )


def separates(lost: list[Estimate], remained: list[Estimate]) -> str:
    """Say whether all intervals of the one kind of network lie on the same side of all intervals of the other.

    Example:
        >>> fallen, steady = Estimate(-0.9, 0.1, 5), Estimate(0.0, 0.1, 5)
        >>> separates([fallen], [steady]), separates([steady], [fallen]), separates([fallen, steady], [steady])
        ('lower', 'higher', 'neither')
    """
    if max(one.high for one in lost) < min(one.low for one in remained):
        return "lower"
    return "higher" if min(one.low for one in lost) > max(one.high for one in remained) else "neither"
