"""Files that training data comes in, read by `ElasticBatches`: each record once, on 2 processes and then on 3."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from ckptkit import ElasticBatches
from ckptkit.job.data.position import joined

RECORDS, BATCH = 30, 6


def array_record(root: Path) -> Any:
    """Records by index, from two files."""
    from array_record.python.array_record_module import ArrayRecordWriter

    paths = []
    for part in range(2):
        paths.append(str(root / f"{part}.array_record"))
        writer = ArrayRecordWriter(paths[-1], "group_size:1")
        for record in range(part * RECORDS // 2, (part + 1) * RECORDS // 2):
            writer.write(bytes([record, 0]))
        writer.close()
    source: Any = grain.sources.ArrayRecordDataSource(paths)
    return grain.MapDataset.source(source).seed(1).shuffle().map(lambda data: data[0])


def parquet(root: Path) -> Any:
    """A stream for each of three files."""
    pyarrow = pytest.importorskip("pyarrow", reason="pip install pyarrow: Grain's reader of Parquet needs it")
    files = pytest.importorskip("pyarrow.parquet")
    streams = []
    for part in range(3):
        path = str(root / f"{part}.parquet")
        ids = list(range(part * RECORDS // 3, (part + 1) * RECORDS // 3))
        files.write_table(pyarrow.table({"id": ids}), path, row_group_size=4)
        streams.append(grain.experimental.ParquetIterDataset(path).map(lambda row: row["id"]))
    return streams


@pytest.mark.parametrize("source", [array_record, parquet])
def test_each_record_of_a_file_is_read_once(tmp_path: Path, source: Callable[[Path], Any]) -> None:
    """A source would begin anew after a restart, or lose what its reader had ahead."""
    data = source(tmp_path)
    order = np.concatenate(list(ElasticBatches(data, BATCH))).tolist()
    assert sorted(order) == list(range(RECORDS))
    taken: list[int] = []
    states: list[str] = []
    for processes, steps in ((2, 2), (3, 3)):
        iterators = [ElasticBatches(data, BATCH, rows=rows) for rows in np.array_split(np.arange(BATCH), processes)]
        for each in iterators if states else ():
            each.set_state(json.loads(joined(states, each.streams) or ""))
        for _ in range(steps):
            taken += np.concatenate([next(each) for each in iterators]).tolist()
        states = [json.dumps(each.get_state()) for each in iterators]
        for each in iterators:
            each.close()
    assert taken == order
