"""Random modules, 2,080 combinations of module, dtype, mode and size in all."""

import pytest
from generated import run

SEEDS = range(13)
MODULES = 5  # in two dtypes, two modes and eight sizes: 160 combinations for each seed


@pytest.mark.filterwarnings("ignore:RNN module weights")  # copies lie apart
@pytest.mark.parametrize("seed", SEEDS)
def test_random_modules_equal_eager_and_couplings_are_found(seed, device):
    """No mismatch, no coupling missed, and most of what may be padded is."""
    tally = run(seed, MODULES, device)
    assert tally.combinations == 160
    assert tally.padded_replays >= 0.6 * tally.uncoupled
