"""Write numbers, names and counts, the same way in every format."""

import math
from collections.abc import Sequence

from pliant.experiments.report.statistics import ANYTHING, LEVEL, Interval

_NAMES = {
    "final_test_accuracy": "final test accuracy",
    "mean_test_accuracy": "mean test accuracy over tasks",
    "final_train_accuracy": "final training accuracy",
    "mean_train_accuracy": "mean training accuracy over tasks",
    "final_task_online_accuracy": "online accuracy in the last task",
    "mean_task_online_accuracy": "mean online accuracy over tasks",
    "task_online_accuracy": "online accuracy over the task",
    "final_test_loss": "final test loss",
    "mean_test_loss": "mean test loss over tasks",
    "final_train_loss": "final training loss",
    "mean_train_loss": "mean training loss over tasks",
    "final_task_online_loss": "online loss in the last task",
    "mean_task_online_loss": "mean online loss over tasks",
    "task_online_loss": "online loss over the task",
    "final_first_test_loss": "final test loss, first text",
    "final_second_test_loss": "final test loss, second text",
    "final_probe_test_loss": "final test loss, probe text",
    "mean_probe_test_loss": "mean test loss over tasks, probe text",
    "final_test_bits_per_character": "final bits per character, test",
    "mean_test_bits_per_character": "mean bits per character over tasks, test",
    "train_accuracy": "training accuracy",
    "train_error": "training error",
    "train_loss": "training loss at the end of a task",
    "loss": "training loss",
    "evaluation_return": "return",
    "train_return": "return of the training episodes",
    "final_late_return": "late return",
    "run_late_return": "return in the last third of the run",
    "run_return": "mean return of the run",
    "run_late_overestimation": "overestimation in the last third of the run",
    "final_task_return": "mean return in the last task",
    "final_evaluation_return": "return at the end",
    "final_overestimation": "overestimation at the end",
    "later_late_return": "late return in the last tasks",
    "later_task_return": "mean return in the last tasks",
    "later_evaluation_return": "return at the ends of the last tasks",
    "later_overestimation": "overestimation at the ends of the last tasks",
    "mean_late_return": "late return over tasks",
    "mean_task_return": "mean return over tasks",
    "mean_evaluation_return": "return at the ends of tasks",
    "mean_overestimation": "overestimation at the ends of tasks",
}


def name_of(metric: str) -> str:
    """Return the readable name of a metric.

    Example:
        >>> name_of("mean_test_accuracy"), name_of("final_return")
        ('mean test accuracy over tasks', 'final return')
    """
    return _NAMES.get(metric, metric.replace("_", " "))


def is_share(metric: str) -> bool:
    """Return whether a metric is a fraction, written in percent."""
    return metric.endswith("accuracy") or metric in ("error", "test_error", "train_error")


def limits(metric: str) -> tuple[float, float]:
    """Return the smallest and largest possible value of a metric."""
    return (0.0, 1.0) if is_share(metric) else ANYTHING


def number(value: float, metric: str, *, unit: bool = True) -> str:
    """Write a value.

    Example:
        >>> number(0.9675, "test_accuracy"), number(1234.5678, "return")
        ('96.75 %', '1235')
    """
    if math.isnan(value):
        return "–"
    if is_share(metric):
        return f"{100 * value:.2f}" + (" %" if unit else "")
    return f"{value:.4g}".replace("-", "−")


def brief(value: float, metric: str) -> str:
    """Write a value for a sentence, with few digits.

    Example:
        >>> brief(0.9675, "test_accuracy"), brief(0.0004, "test_error")
        ('96.8 %', '0.04 %')
    """
    return f"{_percent(value)} %" if is_share(metric) else number(value, metric)


def size(value: float, metric: str) -> str:
    """Write the size of a difference for a sentence, without its sign.

    Example:
        >>> size(-0.0123, "test_accuracy"), size(-2.0, "return")
        ('1.2 points', '2')
    """
    return f"{_percent(abs(value))} points" if is_share(metric) else number(abs(value), metric)


def _percent(value: float) -> str:
    return f"{100 * value:.2f}" if abs(value) < 0.001 else f"{100 * value:.1f}"


def change(value: float, metric: str, *, unit: bool = True) -> str:
    """Write a difference, with its sign.

    Example:
        >>> change(-0.012, "test_accuracy"), change(2.0, "return")
        ('−1.20 points', '+2')
    """
    if math.isnan(value):
        return "–"
    text = f"{100 * value:+.2f}" + (" points" if unit else "") if is_share(metric) else f"{value:+.4g}"
    return text.replace("-", "−")


def span(interval: Interval, metric: str, *, signed: bool = False) -> str:
    """Write the two ends of an interval; empty if they are NaN.

    Example:
        >>> span(Interval(0.5, 0.25, 0.75, 3), "test_accuracy")
        '25.00 to 75.00'
    """
    if math.isnan(interval.low):
        return ""
    write = change if signed else number
    return f"{write(interval.low, metric, unit=False)} to {write(interval.high, metric, unit=False)}"


def probability(p: float) -> str:
    """Write a p-value, with enough digits to show whether it is below the level.

    Example:
        >>> probability(0.0312), probability(0.0496), probability(1e-6)
        ('p = 0.031', 'p = 0.0496', 'p < 0.001')
    """
    if math.isnan(p):
        return "not tested"
    written = (f"{p:.{digits}g}" for digits in range(2, 18))
    return "p < 0.001" if p < 0.001 else f"p = {next(text for text in written if (float(text) < LEVEL) == (p < LEVEL))}"


def join_names(names: Sequence[str]) -> str:
    """Join names for a sentence.

    Example:
        >>> join_names(["a", "b", "c"]), join_names(["a"])
        ('a, b and c', 'a')
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


def enumerate_names(names: Sequence[str], limit: int = 4) -> str:
    """Join names for a sentence; of more than `limit`, name the first ones and count the others.

    Example:
        >>> enumerate_names(["a", "b", "c"]), enumerate_names(list("abcdef"))
        ('a, b and c', 'a, b, c and 3 others')
    """
    if len(names) > limit:
        return f"{', '.join(names[: limit - 1])} and {len(names) - limit + 1} others"
    return join_names(names)


def count(number: int, what: str) -> str:
    """Write a count with its noun.

    Example:
        >>> count(1, "seed"), count(3, "seed")
        ('1 seed', '3 seeds')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def sentence(line: str) -> str:
    """Turn a line of the terminal into a sentence.

    Example:
        >>> sentence("chosen: l2")
        'Chosen: l2.'
    """
    return f"{line[:1].upper()}{line[1:]}."
