"""The one error type of the package."""


class SmartpruneError(Exception):
    """Says where, what was given, what is allowed and what to do."""
