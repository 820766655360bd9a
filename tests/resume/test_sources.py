"""Files that training data comes in, read by `ElasticBatches`: each record once, on 2 processes and then on 3."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import grain
import numpy as np
import pytest

from ckptkit.job.data_position import joined
from ckptkit.resume import ElasticBatches
from ckptkit.testing.bucket import BucketServer

RECORDS, BATCH = 30, 6


@dataclass(frozen=True, slots=True)
class Files:
    """A directory to write files of data in, and where they are then: there, or in a bucket."""

    written: Path
    bucket: Any  # a file system of fsspec; None for a disk

    def local(self) -> Path:
        """The directory for readers that know local files alone."""
        if self.bucket is None:
            return self.written
        here = self.written.with_name("fetched")
        self.bucket.get(self.stored(), str(here), recursive=True)
        return here

    def stored(self) -> str:
        """The directory for readers that take a file system."""
        if self.bucket is None:
            return str(self.written)
        self.bucket.put(str(self.written), "data/set", recursive=True)
        return "data/set"


@pytest.fixture(params=["disk", "bucket"])
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    written = tmp_path / "written"
    written.mkdir()
    if request.param == "disk":
        yield Files(written, None)
        return
    with BucketServer(dir=tmp_path / "bucket", buckets=["data"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        yield Files(written, fsspec.filesystem("gs", token="anon", skip_instance_cache=True))


def array_record(files: Files) -> Any:
    """Records by index, from two files."""
    from array_record.python.array_record_module import ArrayRecordWriter

    names = [f"{part}.array_record" for part in range(2)]
    for part, name in enumerate(names):
        writer = ArrayRecordWriter(str(files.written / name), "group_size:1")
        for record in range(part * RECORDS // 2, (part + 1) * RECORDS // 2):
            writer.write(bytes([record, 0]))
        writer.close()
    local = files.local()
    source: Any = grain.sources.ArrayRecordDataSource([str(local / name) for name in names])
    return grain.MapDataset.source(source).seed(1).shuffle().map(lambda data: data[0])


def parquet(files: Files) -> Any:
    """A stream for each of three files; in a bucket they are read in place."""
    pyarrow = pytest.importorskip("pyarrow", reason="pip install pyarrow: Grain's reader of Parquet needs it")
    writer = pytest.importorskip("pyarrow.parquet")
    for part in range(3):
        ids = list(range(part * RECORDS // 3, (part + 1) * RECORDS // 3))
        writer.write_table(pyarrow.table({"id": ids}), files.written / f"{part}.parquet", row_group_size=4)
    stored = files.stored()
    paths = [f"{stored}/{part}.parquet" for part in range(3)]
    streams = [grain.experimental.ParquetIterDataset(path, filesystem=files.bucket) for path in paths]
    return [stream.map(lambda row: row["id"]) for stream in streams]


def tfds(files: Files) -> Any:
    """Records by index, from a data set that TFDS has prepared as ArrayRecord; TensorFlow is not needed."""
    datasets: Any = pytest.importorskip("tensorflow_datasets", reason="pip install tensorflow-datasets")

    class Ids(datasets.core.GeneratorBasedBuilder, skip_registration=True):  # pyright: ignore[reportGeneralTypeIssues, reportCallIssue]
        VERSION = datasets.core.Version("1.0.0")
        pkg_dir_path, code_path = files.written, None  # it looks for the files of a published data set

        def _info(self) -> Any:
            features = {"id": datasets.features.Scalar(np.int64)}
            return self.dataset_info_from_configs(features=datasets.features.FeaturesDict(features))

        def _split_generators(self, _: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            return ((number, {"id": number}) for number in range(RECORDS))

    datasets.disable_progress_bar()
    Ids(data_dir=files.written, file_format="array_record").download_and_prepare()
    builder = datasets.builder_from_directory(files.local() / "ids" / "1.0.0")
    return grain.MapDataset.source(builder.as_data_source("train")).seed(1).shuffle().map(lambda row: row["id"])


@pytest.mark.parametrize("source", [array_record, parquet, tfds])
def test_each_record_of_a_file_is_read_once(files: Files, source: Callable[[Files], Any]) -> None:
    """A source would begin anew after a restart, or lose what its reader had ahead."""
    data = source(files)
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
