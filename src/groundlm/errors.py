"""The one exception that a user's mistake raises."""


class UserError(Exception):
    """Bad input, named in one line with its numbers.

    The command line prints the message alone and ends with exit code 2; library callers catch it
    like any other exception. Everything else that escapes a command is a bug.
    """
