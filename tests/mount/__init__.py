"""A mounted bucket for tests: it renames object by object, lists late, and loses unsynced bytes."""

from tests.mount.mounted import MountedBucket as MountedBucket
from tests.mount.mounted import why_not as why_not
