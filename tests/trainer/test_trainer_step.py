"""The step on 4 virtual devices. One subprocess runs it all, several tests read what it found."""

import json
import math
import os
import sys
from pathlib import Path

import pytest

from tests.forked import run_forked

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    script = str(Path(__file__).with_name("four_devices.py"))
    done = run_forked([sys.executable, script, str(tmp_path_factory.mktemp("corpus"))], env=environment, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Involuntary full rematerialization" not in done.stderr, "a layout that XLA can only reach by replicating"
    return json.loads(done.stdout)


def test_state_is_donated(found):
    """Each step would hold the state twice."""
    assert found["tiny"]["donated"]


@pytest.mark.parametrize("scenario", ["tiny", "accumulated"])
def test_dropout_counter_is_state(found, scenario):
    """Every step would drop the same elements, and a resume with a wrong counter would go unseen."""
    assert found[scenario]["dropout_count"] == len(found[scenario]["losses"])
    assert len(found[scenario]["dropout_key"]) == 2


def test_moments_are_sharded_like_their_weights(found):
    """Optimizer memory would not shrink with the mesh."""
    moments = {path.partition("/mu/")[2]: where for path, where in found["tiny"]["moments"].items()}
    weights = {path.removeprefix("model/"): where for path, where in found["tiny"]["weights"].items()}
    assert moments == weights
    assert not weights["blocks/0/mlp/up"][1], "a weight above 1 MB must not lie whole on every device"


def test_loss_goes_down_on_real_text(found):
    """The model would not learn: 20 steps take a byte model from ln 256 = 5.5 to the byte frequencies and below."""
    losses = found["tiny"]["losses"]
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert sum(losses[-5:]) / 5 < 3.4
    assert found["tiny"]["finite"]
    assert found["accumulated"]["losses"][-1] < found["accumulated"]["losses"][0]
