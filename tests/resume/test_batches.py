"""A job that goes on with another number of processes takes every record once, in the same order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckptkit.guard import Alarm, Guard, GuardRecord, Rollback, Skips
from ckptkit.job.data_position import joined
from ckptkit.resume import ElasticBatches
from tests.cases import long_except

RECORDS, EPOCHS, STREAMS = 40, 3, 4
CHAIN = ((4, 3), (3, 2), (2, 2), (4, None))  # processes, steps; None is until the end
NO_SHARDS = grain.sharding.NoSharding()


def shuffled(records: int = RECORDS) -> Any:
    return grain.MapDataset.range(records).seed(3).shuffle().repeat(EPOCHS)


class Double(grain.transforms.Map):
    def map(self, element: int) -> Any:
        return 2 * element


class Noise(grain.transforms.RandomMap):
    def random_map(self, element: int, rng: np.random.Generator) -> Any:
        return element, float(rng.random())


def loader(*operations: Any, workers: int = 0, shards: Any = NO_SHARDS) -> grain.DataLoader:
    sampler = grain.samplers.IndexSampler(RECORDS, shuffle=True, seed=3, num_epochs=EPOCHS, shard_options=shards)
    return grain.DataLoader(data_source=range(RECORDS), sampler=sampler, operations=operations, worker_count=workers)  # pyright: ignore[reportArgumentType]


def streams() -> list[Any]:
    parts = [grain.MapDataset.range(RECORDS)[number::STREAMS] for number in range(STREAMS)]
    return [part.seed(3).shuffle().repeat(EPOCHS).to_iter_dataset() for part in parts]


SOURCES: dict[str, Callable[[], Any]] = {
    "MapDataset": shuffled,
    "DataLoader": loader,
    "DataLoader that filters": lambda: loader(Keep()),
    "IterDataset that filters": lambda: shuffled(2 * RECORDS).to_iter_dataset().filter(lambda record: record < RECORDS),
    "streams": streams,
}


class Keep(grain.transforms.Filter):
    def filter(self, element: int) -> bool:
        return element < RECORDS


def job(data: Callable[[], Any], batch: int, processes: int, states: Sequence[str] = ()) -> list[ElasticBatches]:
    """The iterators of all processes of a job, at the position that an earlier job's processes saved."""
    rows = np.array_split(np.arange(batch), processes)
    found = [ElasticBatches(data(), batch, rows=part) for part in rows]
    for each in found if states else ():
        state = joined(states, each.streams)
        assert state is not None
        each.set_state(json.loads(state))
    return found


def take(processes: Sequence[ElasticBatches], steps: int | None) -> list[list[Any]]:
    """The global batches of so many steps, or of all that are left: the processes' rows together."""
    taken: list[list[Any]] = []
    while steps is None or len(taken) < steps:
        parts = [next(each, None) for each in processes]
        if None in [part if part is None else 0 for part in parts]:
            assert all(part is None for part in parts), "the processes end at different steps"
            return taken
        taken.append(np.concatenate(parts).tolist())  # pyright: ignore[reportArgumentType, reportCallIssue]
    return taken


@pytest.mark.parametrize(
    "batch", [pytest.param(12, marks=pytest.mark.long), 8]
)  # 8 rows do not split evenly over 3 processes
@pytest.mark.parametrize("source", long_except(["streams", "DataLoader that filters"], SOURCES))
def test_each_record_is_taken_once_per_epoch_by_4_3_2_4_processes(source: str, batch: int) -> None:
    """A job that lost a host would train on some records twice, and on others never."""
    undisturbed = take(job(SOURCES[source], batch, 1), None)
    taken: list[list[Any]] = []
    states: list[str] = []
    for processes, steps in CHAIN:
        iterators = job(SOURCES[source], batch, processes, states)
        taken += take(iterators, steps)
        states = [json.dumps(each.get_state()) for each in iterators]
        if source != "streams":
            assert len(set(states)) == 1, "the position is the same on every process"
        for each in iterators:
            each.close()
    assert taken == undisturbed
    ids = [record for step in taken for record in step]
    assert len(ids) == RECORDS * EPOCHS
    if source == "streams":  # each part of the data has epochs of its own
        parts = [[record for record in ids if record % STREAMS == number] for number in range(STREAMS)]
    else:
        parts = [ids]
    for part in parts:
        size = len(part) // EPOCHS
        epochs = [part[i : i + size] for i in range(0, len(part), size)]
        assert all(Counter(epoch) == Counter(sorted(part)[::EPOCHS]) for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_order_is_that_of_the_data() -> None:
    """The global order would be another one than the person gave."""
    data = shuffled()
    (batches,) = job(shuffled, 12, 1)
    assert next(batches).tolist() == [data[i] for i in range(12)]
    assert loader_ids() == [record for step in take(job(loader, 12, 2), None) for record in step]


def loader_ids() -> list[int]:
    return list(loader())


@pytest.fixture
def parsed_flags() -> Iterator[None]:
    """Grain's worker processes are given its flags, which a program parses in `absl.app.run`."""
    flags.FLAGS.mark_as_parsed()
    yield
    flags.FLAGS.unparse_flags()


@pytest.mark.usefixtures("parsed_flags")
@pytest.mark.parametrize("kind", ["DataLoader", "MapDataset"])
@pytest.mark.long
def test_worker_processes_give_the_same_batches(kind: str) -> None:
    """Batches would depend on how many worker processes read them."""
    options = {"multiprocessing_options": grain.MultiprocessingOptions(num_workers=2)} if kind == "MapDataset" else {}

    def opened(workers: int) -> ElasticBatches:
        data = shuffled() if kind == "MapDataset" else loader(Double(), workers=workers)
        batches = ElasticBatches(data, 8, rows=[1, 2, 5], **(options if workers else {}))  # pyright: ignore[reportArgumentType]
        batches.set_state({**batches.get_state(), "step": 4, "record": 32})
        return batches

    expected = [batch.tolist() for batch in opened(0)]
    workers = opened(2)
    try:
        assert [batch.tolist() for batch in workers] == expected
    finally:
        workers.close()
    assert len(expected) == 11, "15 steps in all"


@pytest.mark.usefixtures("parsed_flags")
@pytest.mark.parametrize("kind", ["DataLoader", "MapDataset"])
@pytest.mark.long
def test_worker_processes_leave_out_what_a_guard_skips(kind: str) -> None:
    """A run with a guard and worker processes could not start, or would read the skipped batches after a rollback."""
    guard = Guard()
    options = {"multiprocessing_options": grain.MultiprocessingOptions(num_workers=2)} if kind == "MapDataset" else {}
    data = shuffled() if kind == "MapDataset" else loader(Double(), workers=2)
    batches = ElasticBatches(data, 8, batch_of=lambda step: guard.skips.batch_of(step), **options)  # pyright: ignore[reportArgumentType]
    expected = take([ElasticBatches(shuffled() if kind == "MapDataset" else loader(Double()), 8)], None)
    try:
        saved = batches.get_state()
        assert take([batches], 4) == expected[:4]
        alarm = Alarm(rule="spike", signal="loss", step=3, onset=3, value=9.0, limit=1.0)
        back = Rollback(alarm=alarm, first_step=2, first_batch=2, stop_batch=5)
        batches.set_state(saved)  # as a rollback does: first the restore, then `resume`
        guard.resume(GuardRecord(rollbacks=(back,)).to_json())
        assert take([batches], None) == [*expected[:2], *expected[5:]]
    finally:
        batches.close()


def test_random_numbers_of_a_record_are_those_of_its_place() -> None:
    """Augmentations would change with the number of processes."""

    def noisy() -> Any:
        return loader(Noise())

    whole = [ElasticBatches(noisy(), 8, rows=range(8))]
    parts = [ElasticBatches(noisy(), 8, rows=rows) for rows in np.array_split(np.arange(8), 3)]
    for _ in range(3):
        expected = next(whole[0])
        found = [next(each) for each in parts]
        for leaf in (0, 1):
            assert np.concatenate([each[leaf] for each in found]).tolist() == expected[leaf].tolist()


def test_rows_of_a_sharding_are_read() -> None:
    """Devices would hold other rows than the array; a sharding of two axes would be refused."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "model"))
    batches = ElasticBatches(shuffled(), 8, rows=NamedSharding(mesh, PartitionSpec("data", "model")))
    assert batches.rows.tolist() == list(range(8))
    assert ElasticBatches(shuffled(), 8).rows.tolist() == list(range(8)), "one process has all rows"
    with pytest.raises(ValueError, match=r"process 0 has rows \[8\] of a batch of 8; give one or more of 0 to 7"):
        ElasticBatches(shuffled(), 8, rows=[8])


def test_another_batch_size_goes_on_with_the_next_record() -> None:
    """A job whose batch shrinks with its hosts would repeat or skip records."""
    (large,) = job(shuffled, 12, 1)
    taken = take([large], 2)
    small = ElasticBatches(shuffled(), 8)
    small.set_state(large.get_state())
    assert small.step == 2
    ids = [record for step in [*taken, *take([small], None)] for record in step]
    assert ids == [shuffled()[i] for i in range(24 + 96)]


def test_skipped_batches_are_left_out() -> None:
    """A guard's rollback would train on the poisoned batches again."""
    skips = Skips(((3, 5),))
    data: Any = shuffled()
    batches = ElasticBatches(data, 8, batch_of=skips.batch_of, first_step=2)
    taken = take([batches], None)
    expected = [[data[i] for i in range(8 * batch, 8 * batch + 8)] for batch in (2, *range(5, 15))]
    assert taken == expected
    assert batches.get_state()["record"] == RECORDS * EPOCHS
    again = ElasticBatches(data, 8, batch_of=skips.batch_of)
    again.set_state({**batches.get_state(), "step": 3, "record": 24})  # as it was saved before the skip
    assert next(again).tolist() == expected[1]


def test_batches_are_skipped_by_number_only_where_all_have_one_size() -> None:
    """Batch 5 of 4 records begins at record 20. A run that took 2 batches of 8 before would repeat or skip records."""
    (large,) = job(shuffled, 8, 1)
    take([large], 2)
    small = ElasticBatches(shuffled(), 4)
    small.set_state(large.get_state())
    take([small], 3)
    with pytest.raises(ValueError, match="step 5 continues at record 28, and by batch_of it begins at record 20"):
        ElasticBatches(shuffled(), 4, batch_of=Skips(()).batch_of).set_state(small.get_state())
    skips = Skips(((1, 3),))
    skipping = ElasticBatches(shuffled(), 4, batch_of=skips.batch_of)
    take([skipping], 2)
    more = ElasticBatches(shuffled(), 4, batch_of=Skips(((1, 3), (4, 6))).batch_of)
    more.set_state(skipping.get_state())
    assert next(more).tolist() == [shuffled()[i] for i in range(24, 28)]


SKIPPED = st.one_of(st.none(), st.frozensets(st.sampled_from([(1, 3), (4, 5), (6, 9)]), max_size=2))
PARTS = st.lists(st.tuples(st.sampled_from([2, 3, 4]), SKIPPED, st.integers(1, 4)), min_size=2, max_size=4)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(PARTS)
def test_restarts_that_change_batch_size_and_skips_take_no_record_twice(
    parts: list[tuple[int, frozenset[tuple[int, int]] | None, int]],
) -> None:
    """A change of both is refused, or each record comes once, and only skipped batches are left out."""
    data: Any = grain.MapDataset.range(1000)
    state: dict[str, Any] | None = None
    following = 0
    for size, ranges, steps in parts:
        skips = None if ranges is None else Skips(tuple(sorted(ranges)))
        batches = ElasticBatches(data, size, batch_of=skips and skips.batch_of)
        try:
            if state is not None:
                batches.set_state(state)
        except ValueError:
            hypothesis.event("refused")
            return
        for _ in range(steps + 1):
            state = batches.get_state()
            left_out = range(following, state["record"])
            assert following <= state["record"]
            assert all(any(first <= record // size < stop for first, stop in ranges or ()) for record in left_out)
            following = state["record"] + size
            assert next(batches).tolist() == list(range(state["record"], following))
        following -= size  # the last one is not in the position


def test_data_that_ends_within_a_batch_leaves_the_rest_out() -> None:
    """Processes would have arrays of different shapes in one step."""
    (batches,) = job(shuffled, 50, 1)
    assert [len(step) for step in take([batches], None)] == [50, 50]
    assert next(batches, None) is None
    (endless,) = job(lambda: grain.MapDataset.range(5).repeat(), 4, 1)
    assert take([endless], 3) == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]


def test_text_and_bytes_are_not_cut() -> None:
    """NumPy's fixed-length text drops zeros at the end of a record."""
    data: Any = grain.MapDataset.source([{"text": b"a\0", "n": 1}, {"text": b"bcd", "n": 2}])
    batch = next(ElasticBatches(data, 2))
    assert batch["text"].tolist() == [b"a\0", b"bcd"]
    assert batch["n"].tolist() == [1, 2]


def test_position_of_other_data_is_refused() -> None:
    """A run would go on with another order, or with other streams, without a message."""
    state = ElasticBatches(shuffled(), 8).get_state()
    with pytest.raises(ValueError, match="saved for data of 120 records, this data has 240: its order is another one"):
        ElasticBatches(shuffled(80), 8).set_state(state)
    with pytest.raises(ValueError, match="global_batch is 8 in the saved position, 4 here: batches are skipped by"):
        ElasticBatches(shuffled(), 4, batch_of=lambda step: step).set_state(state)
    with pytest.raises(ValueError, match="saved for 4 streams, this data has 1; their number is fixed for a run"):
        ElasticBatches(streams()[0], 8).set_state(ElasticBatches(streams(), 8).get_state())
    with pytest.raises(
        ValueError, match=r"not a position of ElasticBatches: format is None, expected 'ckptkit.batches/1'"
    ):
        ElasticBatches(shuffled(), 8).set_state({"next_index": 3})


def test_data_that_has_no_fixed_order_is_refused() -> None:
    """Rows would be read by an index that means another record on another number of processes."""
    dropped = ElasticBatches(grain.MapDataset.range(8).filter(lambda record: record != 3), 4)
    with pytest.raises(ValueError, match="record 3 is None: a transformation drops it"):
        next(dropped)
    with pytest.raises(ValueError, match=r"the loader has 2 shards; give one with grain.sharding.NoSharding\(\)"):
        ElasticBatches(loader(shards=grain.sharding.ShardOptions(0, 2)), 4)
    with pytest.raises(ValueError, match="4 streams do not divide a batch of 6 rows"):
        ElasticBatches(streams(), 6)
    with pytest.raises(ValueError, match="list is not a MapDataset, an IterDataset, a DataLoader or a sequence"):
        ElasticBatches([[1, 2]], 1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="batch_of and first_step need data with an index"):
        ElasticBatches(streams(), 8, first_step=3)
    with pytest.raises(ValueError, match="read_options and multiprocessing_options are for a MapDataset"):
        ElasticBatches(streams(), 8, read_options=grain.ReadOptions())


def test_states_of_other_positions_or_lost_streams_are_refused() -> None:
    """A process would begin a lost stream anew, and train on it twice."""
    iterators = job(streams, 8, 2)
    assert joined([json.dumps({"next_index": 3})]) is None
    assert joined(["not JSON"]) is None
    apart = [json.dumps(each.get_state()) for each in iterators]
    assert joined(apart, range(STREAMS)), "at the start no stream has a position"
    next(iterators[0])
    with pytest.raises(ValueError, match="processes saved different positions in the data"):
        joined([json.dumps(each.get_state()) for each in iterators])
    next(iterators[1])
    first, second = (json.dumps(each.get_state()) for each in iterators)
    assert joined([first], (0, 1))
    with pytest.raises(ValueError, match="no reachable process holds the position of stream 2, 3"):
        joined([first], range(STREAMS))
    assert json.loads(joined([first, second], range(STREAMS)) or "")["streams"].keys() == {"0", "1", "2", "3"}
    with pytest.raises(ValueError, match="different positions"):
        joined([json.dumps({"global_next_index": 3}), json.dumps({"global_next_index": 4})])


def test_script_that_leaves_batches_open_ends_without_a_message() -> None:
    """Each job that does not call `close` ended with "Exception ignored in" and a traceback."""
    lines = [
        "import grain, numpy",
        "from ckptkit.resume import ElasticBatches",
        "batches = ElasticBatches(grain.MapDataset.source(numpy.arange(64)), global_batch=8, rows=range(8))",
        "print(next(batches)[0])",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
