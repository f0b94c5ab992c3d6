"""What a user's mistake raises, and the hint that goes with it."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input, named in one line with its numbers.

    The command line prints the message alone and ends with exit code 2; library callers catch it
    like any other exception. Everything else that escapes a command is a bug.
    """

    exit_code = 2


class RunFault(UserError):
    """A run that cannot go on for a reason outside its settings: a full disk, a loss that is not a
    number any more. What was saved before is intact; the command ends with exit code 3."""

    exit_code = 3


class FailedElsewhere(UserError):
    """Another process of the run failed and says why; this one ends silently with its exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the known word closest to `word`, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
