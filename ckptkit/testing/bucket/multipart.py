"""`multipart/related` uploads, streamed, and `multipart/mixed` batches, which are small."""

import re
from collections.abc import Mapping
from email.message import Message
from typing import Final, Protocol, final

from ckptkit.testing.bucket import errors
from ckptkit.testing.bucket.call import parse_json
from ckptkit.testing.bucket.records import JsonObject

HEAD_LIMIT_BYTES: Final = 64 * 1024
_BLANK_LINE: Final = re.compile(rb"\r?\n\r?\n")


class Body(Protocol):
    """Bytes that arrive; empty at the end."""

    async def read(self) -> bytes:
        """The next bytes, none at the end."""
        ...


@final
class RelatedBody:
    """Reads the metadata part whole, then is itself the `Body` of the media part.

    Holds back one delimiter's length of bytes, so memory does not grow with the object.
    """

    def __init__(self, body: Body, content_type: str) -> None:
        self._body = body
        self._boundary = b"--" + boundary_of(content_type, "multipart/related")
        self._delimiter = b"\n" + self._boundary
        self._held = b"\n"  # so that a delimiter on the first line is found like the others
        self._ended = False
        self.media_type = ""

    async def metadata(self) -> JsonObject:
        """Read up to the first byte of the media; 400 when that place cannot be found."""
        await self._until_delimiter()
        while len(self._held) < 2:
            self._held += await self._more()
        # gcsfs ends lines with LF alone: then a CR before the delimiter belongs to the media.
        self._delimiter = (b"\r\n" if self._held.startswith(b"\r\n") else b"\n") + self._boundary
        await self._headers()
        document = await self._until_delimiter()
        self.media_type = (await self._headers()).get("content-type", "")
        return parse_json(document)

    async def read(self) -> bytes:
        """The next bytes of the media; 400 when the body ends without the closing delimiter."""
        while not self._ended:
            at = self._held.find(self._delimiter)
            if at >= 0:
                media = self._held[:at]
                await self._close(self._held[at + len(self._delimiter) :])
                if media:
                    return media
                break
            keep = len(self._delimiter) - 1  # the delimiter may have begun
            if len(self._held) > keep:
                media, self._held = self._held[:-keep], self._held[-keep:]
                return media
            self._held += await self._more()
        return b""

    async def _close(self, rest: bytes) -> None:
        while len(rest) < 2:
            rest += await self._more()
        if not rest.startswith(b"--"):
            raise _broken()
        self._ended = True
        while await self._body.read():
            pass

    async def _headers(self) -> dict[str, str]:
        while _BLANK_LINE.search(self._held) is None:
            if len(self._held) > HEAD_LIMIT_BYTES:
                raise _broken()
            self._held += await self._more()
        head, self._held = _BLANK_LINE.split(self._held, maxsplit=1)
        if head.startswith(b"--"):
            raise _broken()
        return parse_headers(head)

    async def _until_delimiter(self) -> bytes:
        while self._delimiter not in self._held:
            if len(self._held) > HEAD_LIMIT_BYTES:
                raise _broken()
            self._held += await self._more()
        before, _, self._held = self._held.partition(self._delimiter)
        return before

    async def _more(self) -> bytes:
        chunk = await self._body.read()
        if not chunk:
            raise _broken()
        return chunk


def boundary_of(content_type: str, expected: str) -> bytes:
    """The boundary of a multipart Content-Type, or 400."""
    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_param("boundary")
    if message.get_content_type() != expected or not isinstance(boundary, str) or not 0 < len(boundary) <= 256:
        raise errors.invalid(f"Expected Content-Type {expected} with a boundary, got {content_type[:96]!a}")
    return boundary.encode("utf-8", "replace")


def parse_headers(head: bytes) -> dict[str, str]:
    """Header lines by lower-case name; lines that are none are skipped."""
    lines = (line.partition(":") for line in head.decode("utf-8", "replace").splitlines())
    return {name.strip().lower(): value.strip() for name, colon, value in lines if colon}


def split_mixed(body: bytes, content_type: str) -> list[tuple[Mapping[str, str], bytes]]:
    """The parts of a batch: headers and content of each; 400 if the closing delimiter is missing."""
    delimiter = b"\n--" + boundary_of(content_type, "multipart/mixed")
    pieces = (b"\n" + body).split(delimiter)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise _broken()
    parts: list[tuple[Mapping[str, str], bytes]] = []
    for piece in pieces[1:-1]:
        halves = _BLANK_LINE.split(piece, maxsplit=1)
        if len(halves) != 2:
            raise _broken()
        parts.append((parse_headers(halves[0]), halves[1]))
    return parts


def _broken() -> errors.GoogleError:
    return errors.invalid("Malformed multipart body.", reason="badContent")
