"""Measures one case in this process and prints it as one line of JSON: `python -m bench.worker`, run by `bench`.

A process of its own, because the number of devices is fixed when JAX is imported.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
from pathlib import Path

from bench import commit, durable, restore, stall
from bench.bars import ratios
from bench.cases import CaseName
from bench.figures import available
from bench.runs import PLACES, Run
from bench.states import make_case

_MEASURES = {
    "stall": stall.measure,
    "commit": commit.measure,
    "restore": restore.measure,
    "durable": durable.measure,
}
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Reads its arguments, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.worker", description=__doc__)
    parser.add_argument("benchmark", choices=sorted(_MEASURES))
    parser.add_argument("--state", required=True)
    parser.add_argument("--contenders", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--ramdisk", type=Path, required=True)
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--place")
    asked = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the one who asked
    contenders = tuple(asked.contenders.split(","))
    case = make_case(CaseName.parse(asked.state), asked.scale)
    run = Run(
        case=case,
        contenders=contenders,
        repeats=asked.repeats,
        ramdisk=asked.ramdisk,
        disk=asked.disk,
        scale=asked.scale,
        places=(asked.place,) if asked.place else PLACES,
    )
    measured = _MEASURES[asked.benchmark](run)
    found = {
        "state_bytes": case.state_bytes,
        "leaves": case.leaves,
        **measured.to_json(available()),
        "ratios": ratios(case.name, measured.samples),
    }
    print("\n" + json.dumps(found))  # on a line of its own: libraries print too


if __name__ == "__main__":
    main()
