"""Which test files take longest, most of them because they launch jobs or campaigns: begun first, see `conftest.py`.

By processor time with that of the processes that they launch, or half of the time on the clock where that is more.
`pytest --durations=0` says when the list is out of date; nothing depends on it but how long a run takes.
"""

LONGEST_FIRST = (
    "multiprocess/test_elastic.py",
    "bench/test_crashpoints.py",
    "multiprocess/test_kill_phases.py",
    "multiprocess/test_clusters.py",
    "bench/test_end_to_end.py",
    "trainer/test_trainer_step.py",
    "bench/test_corruption.py",
    "tools/test_demo.py",
    "bench/test_faults.py",
    "docs/test_code_blocks.py",
    "multiprocess/test_saves.py",
    "multiprocess/test_restore_anywhere.py",
    "bench/test_broadcast.py",
    "formats/test_llama.py",
    "multiprocess/test_broadcast.py",
    "formats/test_hostile.py",
    "bucket/test_bucket_orbax.py",
    "peers/test_jobs.py",
    "cli/test_every_command.py",
    "interop/test_tutorials.py",
    "bench/test_convert.py",
    "manager/test_nnx.py",
    "dropin/test_two_processes.py",
    "interop/test_v1.py",
    "multiprocess/test_lost_process.py",
    "resharding/test_reshard.py",
)
