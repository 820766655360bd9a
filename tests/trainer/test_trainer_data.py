"""The global order of batches, whatever the number of processes."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from ckptkit.resume import ElasticBatches
from tests.cases import long_except
from tools.corpus import build_corpus
from trainer.config import InputError
from trainer.data import (
    Position,
    open_batches,
    resume_position,
    shuffled_ids,
    start_position,
)
from trainer.sharding import BATCH_SPEC

RECORDS, BATCH = 50, 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    (root / "a.txt").write_bytes(bytes(range(1, 251)) * 4)
    return build_corpus(str(root), root / "corpora", 20)


@pytest.fixture
def sharding() -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "model"))
    return NamedSharding(mesh, BATCH_SPEC)


@pytest.mark.parametrize("processes", long_except([2], [1, 2, 4]))
def test_order_is_independent_of_the_process_count(processes):
    """A resume on more or fewer hosts would train on other data."""
    whole = [shuffled_ids(RECORDS, 7)[i] for i in range(20 * BATCH)]
    rows = np.split(np.arange(BATCH), processes)
    parts = [ElasticBatches(shuffled_ids(RECORDS, 7), BATCH, rows=part) for part in rows]
    for step in range(20):  # crosses an epoch: 160 rows of 50 records
        ids = np.concatenate([next(part) for part in parts])
        assert ids.tolist() == whole[step * BATCH : (step + 1) * BATCH]
    for part in parts:
        part.close()


def test_epochs_cover_everything_in_new_orders():
    """Records would be missed, or every epoch would look alike."""
    ids: Any = shuffled_ids(RECORDS, 7)
    first, second = ([ids[i] for i in range(k, k + RECORDS)] for k in (0, RECORDS))
    assert sorted(first) == sorted(second) == list(range(RECORDS))
    assert first != second
    assert first != [shuffled_ids(RECORDS, 8)[i] for i in range(RECORDS)]


def test_resume_is_exact(corpus, sharding):
    """A resumed run would repeat or skip batches."""
    start = start_position(corpus, global_batch=BATCH, seed=3)
    straight = list(open_batches(corpus, start, sharding, steps=12))
    saved = replace(start, step=7).to_json()
    resumed = list(open_batches(corpus, resume_position(saved, start), sharding, steps=12))
    assert [batch.step for batch in resumed] == [7, 8, 9, 10, 11]
    for a, b in zip(straight[7:], resumed, strict=True):
        np.testing.assert_array_equal(a.rows, b.rows)
        np.testing.assert_array_equal(a.tokens, b.tokens)


def test_tokens_match_their_records(corpus, sharding):
    """The record ids of a proof would not identify the training data."""
    batch = next(iter(open_batches(corpus, start_position(corpus, global_batch=BATCH, seed=3), sharding, steps=1)))
    text = bytes(range(1, 251)) * 4
    for (row, record), tokens in zip(batch.rows, np.asarray(batch.tokens), strict=True):
        assert 0 <= row < BATCH
        assert bytes(tokens.tolist()) == text[record * 20 : (record + 1) * 20]
    assert batch.rows[:, 0].tolist() == list(range(BATCH))


def test_past_the_end_yields_nothing(corpus, sharding):
    """A run that is already done would take another step."""
    done = replace(start_position(corpus, global_batch=BATCH, seed=3), step=5)
    assert list(open_batches(corpus, done, sharding, steps=5)) == []


def test_different_data_is_refused():
    """A resume would go on silently with another order of data."""
    start = Position(step=0, global_batch=8, seed=0, source_digest="aa", records=50)
    saved = start.to_json() | {"step": 9, "global_batch": 16, "source_digest": "bb"}
    with pytest.raises(InputError) as raised:
        resume_position(saved, start)
    assert str(raised.value) == (
        "cannot resume step 9 with other data: global_batch is 16 in the checkpoint, 8 here; "
        "source_digest is 'bb' in the checkpoint, 'aa' here; "
        "give the same --data, --seed, --global-batch and preset, or another --checkpoint to start anew"
    )
