"""Finds phrases that make text hard to read for engineers whose first language is not English: `python -m tools.prose`.

Reads the Markdown pages, and in Python files (tests and benchmarks too) docstrings, comments and string constants with
at least four words. bench/LOG.md is left out: it is a dated record.
Prints one line per finding with the words to use instead, and exits with 1. Findings listed in `prose_allowed.txt` are
not printed; `--allow` writes that list anew. Part of `make lint`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED = Path(__file__).with_name("prose_allowed.txt")
PARTS = ("README.md", "CONTRIBUTING.md", "docs", "ckptkit", "trainer", "tools", "tests", "bench")
# A dated record, a made page, and the examples of phrases to avoid.
LEFT_OUT = ("bench/LOG.md", "bench/REPORT.md", "tools/prose.py", "tests/tools/test_prose.py")
SENTENCE_WORDS_MAX = 36
CELL_WORDS_MAX = 20
_EXCERPT = 60  # characters of a finding, by which the allow list knows it

# Pattern -> what to write. Patterns are matched without case, except those that begin with a capital letter.
WORDS = {
    r"\b(?:says?|said)\b": "reports, logs, returns, records, shows",
    r"\b(?:hears?|heard)\b": "receives, gets, is called",
    r"(?<!there )\b(?:is|are|was|were) no (?!longer|more|less|such)": "is not a",
    r"\bthere (?:is|are) no\b(?! such)": "X does not exist, without X",
    r"\bstands?\b": "is, is stored, counts",
    r"\bbeside\b": "next to, besides, in addition to",
    r"\bmeets?\b|\bmeetings?\b": "exchange, barrier, gets, matches",
    r"\b(?:is|are) gone\b": "is missing, was deleted, no longer exists",
    r"\bgiven up\b|\bgives? up\b": "timed out, is dropped, is released",
    r"\bpassed over\b|\bpasses over\b": "is skipped",
    r"\btaken over\b(?! by)": "is replaced, is adopted",
    r"\blets? go\b": "is released",
    r"\bproves? whole\b|\bproven whole\b": "verifies completely",
    r"\bin silence\b": "without a message",
    r"\bby turns\b": "alternating, in rotation",
    r"\bfor ever\b|\bat all events\b": "without a limit, always",
    r"\b(?:its|whose) word\b|\bwithout a word\b": "its answer, without a message",
    r"\bon (?:its|their) way\b": "in flight, in transfer",
    r"\bfor want of\b|\bbut for\b": "without, except",
    r"(?:^|[.;:] )(?:Who|Whoever|Whatever)\b(?![^.?]{0,90}\?)": "name the subject: the caller, a process, the writer",
    r"(?:^|[.;:] )What\b(?![^.?]{0,90}\?)": "name the thing: the result of, the fields of",
}
_COMPILED = [
    (re.compile(pattern, 0 if "What" in pattern or "Who" in pattern else re.IGNORECASE), advice)
    for pattern, advice in WORDS.items()
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One place in a file: the words, and the advice."""

    path: str
    line: int
    excerpt: str
    advice: str

    @property
    def key(self) -> str:
        """The line of the allow list for it. Without the line number, so that other edits do not move it."""
        return f"{self.path}: {self.excerpt}"


def findings(path: Path, name: str) -> Iterator[Finding]:
    """The findings of one file, in its order."""
    for line, text in sorted(texts(path), key=lambda each: each[0]):
        plain = re.sub(r"`[^`]*`", "``", " ".join(text.split()))
        for pattern, advice in _COMPILED:
            for match in pattern.finditer(plain):
                begin = max(0, match.start() - _EXCERPT // 2)
                yield Finding(path=name, line=line, excerpt=plain[begin : begin + _EXCERPT], advice=advice)
        for words in _too_long(plain):
            yield Finding(path=name, line=line, excerpt=words[:_EXCERPT], advice="make two sentences, or a list")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of what a person reads in a file."""
    source = path.read_text(encoding="utf-8")
    yield from _of_page(source) if path.suffix == ".md" else _of_code(source)


def _of_page(source: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list entries and rows of tables; blocks of code are left out."""
    fenced, begin, block = False, 0, list[str]()
    for number, line in enumerate([*source.splitlines(), ""], 1):
        stripped = line.strip()
        fence = stripped.startswith("```")
        if not stripped or fence or fenced or re.match(r"[-*|#<] ?|\d+\. ", stripped):
            if block:
                yield begin, " ".join(block)
            block = []
        fenced ^= fence
        if stripped and not fence and not fenced:
            begin = begin if block else number
            block.append(stripped)
    if block:
        yield begin, " ".join(block)


def _of_code(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 3:
            for number, part in _paragraphs(node.value):
                yield node.lineno + number, part
    begin, block, last = 0, list[str](), -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = token.line.lstrip().startswith("#")
            if block and not (alone and token.start[0] == last + 1):
                yield begin, " ".join(block)
                block = []
            begin, last = begin if block else token.start[0], token.start[0] if alone else -1
            block.append(token.string.lstrip("# "))
    if block:
        yield begin, " ".join(block)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs of a docstring, each with the number of lines before it. Rows of arguments are paragraphs too."""
    begin, block = 0, list[str]()
    for number, line in enumerate(text.splitlines()):
        new = not line.strip() or re.match(r"\s*[`\w*]+: ", line) or re.match(r"\s*[-*] ", line)
        if new and block:
            yield begin, " ".join(block)
            block = []
        if line.strip():
            begin = begin if block else number
            block.append(line.strip())
    if block:
        yield begin, " ".join(block)


def _too_long(text: str) -> Iterator[str]:
    if text.startswith("|"):
        yield from (cell.strip() for cell in text.split("|") if len(cell.split()) > CELL_WORDS_MAX)
        return
    yield from (each for each in re.split(r"(?<=[.!?:;])\s+", text) if len(each.split()) > SENTENCE_WORDS_MAX)


def all_findings() -> list[Finding]:
    """The findings of every page and module of the repository."""
    found = list[Finding]()
    for part in PARTS:
        base = ROOT / part
        paths = [base] if base.is_file() else sorted(base.rglob("*"))
        for path in paths:
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in (".md", ".py") and name not in LEFT_OUT:
                found += findings(path, name)
    return found


def main(arguments: Iterable[str]) -> int:
    """Prints the findings outside of the allow list, and its rows that match nothing; 1 if there are any."""
    found = all_findings()
    if "--allow" in arguments:
        ALLOWED.write_text("".join(f"{key}\n" for key in sorted({each.key for each in found})))
        return 0
    allowed = set(ALLOWED.read_text().splitlines())
    new = [each for each in found if each.key not in allowed]
    unused = allowed - {each.key for each in found}
    lines = [f"{each.path}:{each.line}: {each.excerpt!r}: write: {each.advice}" for each in new]
    lines += [f"{ALLOWED.name}: remove the row {row!r}: nothing matches it" for row in sorted(unused)]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
