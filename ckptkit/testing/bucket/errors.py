"""Google's answers when a request cannot be served: status, reason and body."""

import json
from typing import Final, final
from xml.sax.saxutils import escape

CONDITION_TEXT: Final = "At least one of the pre-conditions you specified did not hold."
_LOGIN_TEXT: Final = (
    "Anonymous caller does not have storage.objects.get access to the Google Cloud Storage object. "
    "Permission 'storage.objects.get' denied on resource (or it may not exist)."
)
_BUSY_TEXT: Final = "We encountered an internal error. Please try again."


@final
class GoogleError(Exception):
    """A request ends with this status and Google's body for it; costs nothing else."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        domain: str = "global",
        location: tuple[str, str] | None = None,
        headers: dict[str, str] | None = None,
        nested: bool = False,
    ) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.domain = domain
        self.location = location
        self.headers = headers or {}
        self.nested = nested

    def as_json(self) -> bytes:
        """The body of the JSON API."""
        detail = {"message": self.message, "domain": self.domain, "reason": self.reason}
        if self.location is not None:
            detail["locationType"], detail["location"] = self.location
        message = {"text": self.message} if self.nested else self.message
        error = {"code": self.status, "message": message, "errors": [detail]}
        return json.dumps({"error": error}, indent=1).encode()

    def as_text(self) -> bytes:
        """The body of a media download, which Google answers in plain words."""
        return self.message.encode("utf-8", "replace")

    def as_xml(self) -> bytes:
        """The body of the XML API."""
        code = _XML_CODES.get(self.status, "InternalError")
        text = escape(self.message)
        return (
            f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{text}</Message></Error>".encode(
                "utf-8", "replace"
            )
        )


def invalid(message: str, *, reason: str = "invalid") -> GoogleError:
    """400: the request cannot be understood."""
    return GoogleError(400, reason, message)


def required(parameter: str) -> GoogleError:
    """400: a parameter is missing."""
    return GoogleError(400, "required", f"Required parameter: {parameter}", location=("parameter", parameter))


def no_such_object(bucket: str, name: str) -> GoogleError:
    """404 for an object, or for a generation of it that is no longer live."""
    return GoogleError(404, "notFound", f"No such object: {bucket}/{name}")


def no_such_path() -> GoogleError:
    """404 for a path that is not a method of the API."""
    return GoogleError(404, "notFound", "Not Found")


def condition_not_met() -> GoogleError:
    """412: a precondition did not hold, nothing was changed."""
    return GoogleError(412, "conditionNotMet", CONDITION_TEXT, location=("header", "If-Match"))


def conflict(message: str) -> GoogleError:
    """409: the bucket exists, or is not empty."""
    return GoogleError(409, "conflict", message)


def by_status(status: int, *, nested: bool = False) -> GoogleError:
    """The body that comes with a status which carries no detail of the request; `nested`: its message is an object."""
    reason, message, domain = _PLAIN[status]
    location = ("header", "Authorization") if status == 401 else None
    return GoogleError(status, reason, message, domain=domain, location=location, nested=nested)


_PLAIN: Final = {
    401: ("required", _LOGIN_TEXT, "global"),
    403: ("forbidden", "Forbidden", "global"),
    404: ("notFound", "Not Found", "global"),
    408: ("requestTimeout", "The request timed out.", "global"),
    413: ("uploadTooLarge", "Your client issued a request that was too large.", "global"),
    414: ("uriTooLong", "The requested URL is too large to process.", "global"),
    429: (
        "rateLimitExceeded",
        "The rate of requests exceeds the limit. Please reduce your request rate. "
        "See https://cloud.google.com/storage/docs/gcs429.",
        "usageLimits",
    ),
    500: ("internalError", _BUSY_TEXT, "global"),
    502: ("backendError", _BUSY_TEXT, "global"),
    503: ("backendError", _BUSY_TEXT, "global"),
    504: ("backendError", _BUSY_TEXT, "global"),
}

_XML_CODES: Final = {
    304: "NotModified",
    400: "InvalidArgument",
    401: "AuthenticationRequired",
    403: "AccessDenied",
    404: "NoSuchKey",
    412: "PreconditionFailed",
    416: "InvalidRange",
    429: "SlowDown",
    503: "ServiceUnavailable",
}
