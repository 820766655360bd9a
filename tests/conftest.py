"""Every test process has four CPU devices, set before JAX is imported."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
# gcsfs asks Google for a bucket's kind over gRPC at first use; there is no Google behind an emulator.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

from collections.abc import Iterator

import pytest

from ckptkit.store.remote import forget_listings
from tests.mounts import Mounts


@pytest.fixture
def mounts() -> Iterator[Mounts]:
    """Small mounts, unmounted at the end."""
    made = Mounts()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def forget_buckets() -> Iterator[None]:
    """gcsfs remembers what it listed for as long as the process lives; the next test's bucket has the same name."""
    yield
    if "gcsfs" in sys.modules:
        forget_listings("gs://")
