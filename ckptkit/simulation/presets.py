"""Jobs that were published, as far as they were: what is not in the source is said to be assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptkit.simulation.cluster import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The start values of a simulation; every one can be overridden."""

    hosts: int
    days: float
    mtbf_host_h: float
    state_bytes: float
    shares: Mapping[Failure, float]
    outage_s: float
    source: str


PRESETS: Mapping[str, Preset] = {
    "llama3-405b": Preset(
        hosts=2048,
        days=54,
        mtbf_host_h=2048 * 54 * 24 / 419,
        state_bytes=405e9 * 14,
        shares={"process": 0.21, "host": 0.78, "job": 0.01},
        outage_s=0.0,
        source=(
            "Llama 3 405B on 16,384 H100 (2,048 hosts): 419 unexpected interruptions in 54 days, about 78 % of them "
            "hardware (A. Dubey et al., The Llama 3 Herd of Models, 2024, section 3.3.4 and table 5). Assumed: "
            "14 bytes of state per parameter, spare hosts at hand, 1 % of failures that take every host."
        ),
    ),
    "tpu-pod": Preset(
        hosts=2240,
        days=60,
        mtbf_host_h=1000 * 24 / 2.34,
        state_bytes=1e12 * 14,
        shares={"process": 0.5, "host": 0.45, "job": 0.05},
        outage_s=0.0,
        source=(
            "One TPU v5p pod (8,960 chips, 2,240 hosts). No failure rate of a pod is published: the rate is that of "
            "2.34 failures per 1,000 node-days (A. Kokolis et al., Revisiting Reliability in Large-Scale Machine "
            "Learning Research Clusters, HPCA 2025). Assumed: 1e12 parameters, the division of failures."
        ),
    ),
    "spot": Preset(
        hosts=64,
        days=14,
        mtbf_host_h=32.0,
        state_bytes=70e9 * 14,
        shares={"process": 0.04, "host": 0.95, "job": 0.01},
        outage_s=600.0,
        source=(
            "A spot fleet: 4 spot machines were together for 4.7 h (us-west-2c) to 11.5 h (us-east-2a) on average in "
            "the traces of Z. Wu et al., Can't Be Late, NSDI 2024: 19 to 46 h per machine. Assumed: 70e9 parameters, "
            "a replacement after 10 minutes, the division of failures."
        ),
    ),
}
