"""A Google Cloud Storage bucket that behaves like one, and misbehaves on demand.

`BucketServer` serves the JSON API, as TensorStore's `gcs` driver, gcsfs and google-cloud-storage use it, over a
directory: generations and preconditions as Google has them, checksums, resumable uploads, a scripted and seeded
fault plan, and a log of requests. `python -m ckptkit.testing.bucket` is the same as a command.

What it leaves out: authentication (any caller may do anything unless the fault plan says otherwise), object
versions, soft delete, retention, ACLs and IAM, customer keys, decompressive transcoding, the XML API but for reads,
gRPC, partial responses (`fields`), `x-goog-meta-*` headers, rate limits of its own.
"""

from ckptkit.testing.bucket.call import CallKind
from ckptkit.testing.bucket.faults import (
    Delay,
    Effect,
    Fault,
    FaultPlan,
    Fixed,
    Hang,
    Latency,
    Lognormal,
    PermissionWithdrawn,
    QuotaFull,
    Reset,
    SlowBody,
    Status,
    Truncate,
    Uniform,
)
from ckptkit.testing.bucket.log import Entry, Exchange, RequestLog, Totals
from ckptkit.testing.bucket.server import BucketDefect, BucketServer, client_env

Kind = CallKind  # the public name

__all__ = [
    "BucketDefect",
    "BucketServer",
    "Delay",
    "Effect",
    "Entry",
    "Exchange",
    "Fault",
    "FaultPlan",
    "Fixed",
    "Hang",
    "Kind",
    "Latency",
    "Lognormal",
    "PermissionWithdrawn",
    "QuotaFull",
    "RequestLog",
    "Reset",
    "SlowBody",
    "Status",
    "Totals",
    "Truncate",
    "Uniform",
    "client_env",
]
