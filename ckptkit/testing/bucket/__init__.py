"""A Google Cloud Storage bucket that behaves like one, and misbehaves on demand.

`BucketServer` serves a directory by the JSON API that TensorStore's `gcs` driver, gcsfs and google-cloud-storage use.
It has Google's generations and preconditions, checksums, resumable uploads, a scripted and seeded fault plan, and a log
of requests. `python -m ckptkit.testing.bucket` is the same as a command.

It leaves out authentication: any caller may do anything, unless the fault plan forbids it. It also leaves out object
versions, soft delete, retention, ACLs and IAM, customer keys, decompressive transcoding, gRPC, `x-goog-meta-*` headers,
and rate limits of its own. Of the XML API it has only reads.
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
