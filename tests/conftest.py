"""What every test shares: Hypothesis profiles, the device, and a fixed seed.

`HYPOTHESIS_PROFILE` chooses the profile: "ci" (the default) is the same on every run, "deep" looks
longer and at random.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

_ALWAYS = {
    "deadline": None,
    "database": None,
    # a test's device and seed are the same for all of its examples
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
settings.register_profile("ci", derandomize=True, **_ALWAYS)
settings.register_profile("deep", max_examples=1000, **_ALWAYS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)  # the modules are small, and equal runs must be equal in bits


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device a test runs on: the recorder on the CPU, and real graphs where there is a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
