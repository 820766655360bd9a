"""Listing: which names and prefixes one page holds. Pure."""

import base64
import bisect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptkit.testing.bucket import errors

PAGE_LIMIT: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQuery:
    """The parameters of `objects.list` that are understood; others are ignored as by Google."""

    prefix: str = ""
    delimiter: str = ""
    trailing_delimiter: bool = False
    start: str = ""
    end: str | None = None
    glob: re.Pattern[str] | None = None
    limit: int = PAGE_LIMIT

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> "ListQuery":
        """Read a query; 400 for values that cannot be."""
        if query.get("versions", "false") not in {"true", "false"}:  # no bucket here has versions: all are live
            raise errors.invalid(f"Invalid value for versions: {query['versions'][:64]!a}")
        start = query.get("startOffset", "")
        if query.get("pageToken"):
            start = max(start, _token_start(query["pageToken"]))
        return cls(
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            trailing_delimiter=query.get("includeTrailingDelimiter", "") == "true",
            start=start,
            end=query.get("endOffset") or None,
            glob=_glob(query["matchGlob"]) if query.get("matchGlob") else None,
            limit=_limit(query.get("maxResults")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page, in the order of UTF-8 bytes; `token` leads to the next and is None on the last."""

    names: list[str]
    prefixes: list[str]
    token: str | None


def page(names: Sequence[str], query: ListQuery) -> Page:
    """Cut one page out of the sorted `names`; skips each rolled-up prefix by one search."""
    items: list[str] = []
    prefixes: list[str] = []
    at = bisect.bisect_left(names, max(query.prefix, query.start))
    while at < len(names):
        name = names[at]
        if not name.startswith(query.prefix) or (query.end is not None and name >= query.end):
            break
        if query.glob is not None and query.glob.fullmatch(name) is None:
            at += 1
            continue
        if len(items) + len(prefixes) >= query.limit:
            return Page(names=items, prefixes=prefixes, token=_token(name))
        group = _group(name, query)
        if group is None:
            items.append(name)
            at += 1
            continue
        prefixes.append(group)
        if query.trailing_delimiter and name == group:
            items.append(name)
        at = len(names) if (end := _after(group)) is None else bisect.bisect_left(names, end, at)
    return Page(names=items, prefixes=prefixes, token=None)


def _group(name: str, query: ListQuery) -> str | None:
    if not query.delimiter:
        return None
    cut = name.find(query.delimiter, len(query.prefix))
    return None if cut < 0 else name[: cut + len(query.delimiter)]


def _after(prefix: str) -> str | None:
    """The least string greater than all that begin with `prefix`."""
    trimmed = prefix.rstrip("\U0010ffff")
    return trimmed[:-1] + chr(ord(trimmed[-1]) + 1) if trimmed else None


def _token(start: str) -> str:
    return base64.urlsafe_b64encode(start.encode("utf-8")).decode("ascii")


def _token_start(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode("utf-8")
    except ValueError as error:
        raise errors.invalid(f"Invalid value for pageToken: {token[:64]!a}") from error


def _limit(text: str | None) -> int:
    if text is None:
        return PAGE_LIMIT
    if re.fullmatch(r"\d{1,9}", text) is None or int(text) == 0:
        raise errors.invalid(f"Invalid value for maxResults: {text[:64]!a}")
    return min(int(text), PAGE_LIMIT)


_GLOB_TOKEN: Final = re.compile(r"\*\*|\*|\?|\[[^\]]+\]|\{|\}|,|\\.|.", re.DOTALL)


def _glob(pattern: str) -> re.Pattern[str]:
    """`*` and `?` stop at slashes, `**` does not; `[..]` and `{a,b}` as in a shell."""
    plain = {"**": ".*", "*": "[^/]*", "?": "[^/]", "{": "(?:", "}": ")"}
    parts: list[str] = []
    depth = 0
    for token in _GLOB_TOKEN.findall(pattern):
        depth += (token == "{") - (token == "}")
        if token in plain:
            parts.append(plain[token])
        elif token == "," and depth:
            parts.append("|")
        elif len(token) > 2 and token.startswith("["):
            parts.append(
                "[" + ("^" if token[1] == "!" else "") + re.escape(token[1:-1].lstrip("!")).replace(r"\-", "-") + "]"
            )
        else:
            parts.append(re.escape(token[-1]))
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error as error:
        raise errors.invalid(f"Invalid value for matchGlob: {pattern[:64]!a}") from error
