"""On an accelerator: no method makes the host wait at a step, but those named here; operators and bytes are as kept."""

import pytest
from benchmarks import operators
from benchmarks.__main__ import RESULTS

# Whether a unit is due decides what is done next; an eigendecomposition is computed again if it failed.
WAITING = {"snr": 1, "feature_rank": 1}
NETWORK = "MLP 3 x 100"


@pytest.fixture(scope="module")
def plain() -> operators.Operators:
    return operators.count_operators(None, NETWORK)[0]


@pytest.mark.parametrize("name", operators.stepping())
def test_operators_are_as_kept_and_none_waits(name: str, plain: operators.Operators) -> None:
    assert sum(operators.added(name, NETWORK, plain)[2].values()) == WAITING.get(name, 0)
    assert operators.write_row(name, NETWORK, plain) in (RESULTS / "operators.txt").read_text().splitlines()


def test_reading_a_number_counts_as_a_wait() -> None:
    model = operators.NETWORKS[NETWORK][0]()
    with operators.Operators() as found:
        next(model.parameters()).sum().item()
    assert found.waits == {"_local_scalar_dense": 1}
