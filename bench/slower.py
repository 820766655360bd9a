"""`python -m bench slower`: the figures that became slower, against stored results and against older code.

A result is compared with the newest earlier one of the same benchmark from the same kind of machine: the same processor
and number of cores. A machine differs from day to day too, so `--turns` measures again: this code and that of a stored
commit, one after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.row import Range, Row, Source, measured
from bench.rows import newest_results, rows_of

_ROOT = Path(__file__).parent.parent
_IN_TURNS = ("stall", "commit", "restore")
_NOISE = 1.05  # the ranges of two results are at least so far apart
_MORE_IS_BETTER = ("_gbps", "goodput", "gap_closed", "recovered", "of_copy_rate")

Key = tuple[str, str, str]


def slower(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """A line for each figure of `after` whose range is worse than that of `before`, by more than 5 %."""
    then = {_key(row): row for row in before}
    lines = []
    for row in after:
        old = then.get(_key(row))
        if old is None:
            continue
        (least, most), (old_least, old_most) = _range(row), _range(old)
        grows = any(word in row.figure for word in _MORE_IS_BETTER)
        if (most * _NOISE < old_least) if grows else (least > old_most * _NOISE and least > 0):
            lines.append(
                f"worse: {row.benchmark} {row.case} {row.figure}: {row.ours:.3g} ({least:.3g} to {most:.3g}), "
                f"before {old.ours:.3g} ({old_least:.3g} to {old_most:.3g}; {old.source})"
            )
    return lines


def compared(result: Mapping[str, Any], stored: Sequence[Mapping[str, Any]]) -> list[str]:
    """`slower` against the newest of `stored` that is earlier, of the same benchmark and kind of machine."""
    at, earlier = result["environment"]["at"], [each for each in stored if _kind(each) == _kind(result)]
    earlier = [each for each in earlier if each["environment"]["at"] < at and set(_cases(each)) & set(_cases(result))]
    if not earlier:
        return [f"{result['benchmark']}: no earlier result of this kind of machine is stored"]
    found = slower(rows_of([earlier[-1]]), rows_of([result]))
    return found or [f"{result['benchmark']}: nothing is worse than {Source.of(earlier[-1])}"]


def _kind(result: Mapping[str, Any]) -> tuple[Any, ...]:
    where = result["environment"]
    return result["benchmark"], where.get("cpu"), where.get("cores")


def _cases(result: Mapping[str, Any]) -> Iterator[str]:
    return (row.case for row in rows_of([result]))


def _key(row: Row) -> Key:
    return row.benchmark, row.case, row.figure


def _range(row: Row) -> Range:
    return row.ends or row.spread or (row.ours, row.ours)


def in_turns(commit: str, benchmarks: Sequence[str], turns: int, words: Sequence[str]) -> list[str]:
    """`slower` of this checkout against the code of `commit`. Each turn is one run of both; which begins alternates."""
    found: dict[str, dict[Key, list[Row]]] = {"before": defaultdict(list), "after": defaultdict(list)}
    with _checkout(commit) as older:
        for turn in range(turns):
            places = [("before", older), ("after", _ROOT)]
            for benchmark in benchmarks:
                for which, place in places if turn % 2 == 0 else places[::-1]:
                    for row in _measured_in(place, benchmark, words):
                        found[which][_key(row)].append(row)
    before, after = (
        [replace(rows[-1], **measured([row.ours for row in rows])) for rows in found[which].values()]
        for which in ("before", "after")
    )
    return slower(before, after)


@contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ckptkit-bench-code-") as home:
        place = Path(home) / "code"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", place, commit], cwd=_ROOT, check=True)
        try:
            yield place
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", place], cwd=_ROOT, check=True)


def _measured_in(place: Path, benchmark: str, words: Sequence[str]) -> list[Row]:
    """The rows of one run of a benchmark with the code in `place`: `python -m` looks into its directory first."""
    with tempfile.TemporaryDirectory(prefix="ckptkit-bench-turn-") as home:
        path = Path(home) / "result.json"
        command = [sys.executable, "-m", "bench", benchmark, "--contender", "ckptkit", *words, "--json", str(path)]
        done = subprocess.run(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode or not path.exists():
            raise click.ClickException(f"{place}: bench {benchmark} ended with code {done.returncode}\n{done.stdout}")
        return rows_of([json.loads(path.read_text())])


@click.command(context_settings={"max_content_width": 120})
@click.argument("files", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1)
@click.option("--turns", type=click.IntRange(min=3), help="Measure so often, in turns with the code of --commit.")
@click.option("--commit", help="[default: that of the newest stored result of `commit`]")
@click.option("--only", type=click.Choice(_IN_TURNS), multiple=True, help="Of these; repeatable.  [default: all]")
@click.option("--scale", type=float, default=1.0, hidden=True, help="Shrinks states and loops: for tests.")
def main(files: tuple[Path, ...], turns: int | None, commit: str | None, only: tuple[str, ...], scale: float) -> None:
    """Names the figures that became slower: of FILES, or of the newest stored results. With --turns, exit code 1 if
    there are any."""
    stored = newest_results()
    if turns is None:
        results = [json.loads(path.read_text()) for path in files] or _newest_of_each(stored)
        for result in results:
            click.echo("\n".join(compared(result, stored)))
        return
    exact = [Source.of(each) for each in stored if each["benchmark"] == "commit" and Source.of(each).exact]
    commit = commit or exact[-1].commit
    words = ["--repeats", "2", "--scale", str(scale)]
    found = in_turns(commit, only or _IN_TURNS, turns, words)
    click.echo("\n".join(found) or f"nothing is worse than at {commit}")
    raise SystemExit(1 if found else 0)


def _newest_of_each(stored: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The newest result of each benchmark and kind of machine that stores where it was made."""
    newest = {_kind(each): each for each in stored if each["environment"].get("cores")}
    return list(newest.values())
