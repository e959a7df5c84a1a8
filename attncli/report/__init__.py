"""What people and programs see, and here what a user can choose of that."""

from enum import StrEnum


class Format(StrEnum):
    """What is printed: for eyes, or for programs."""

    TABLE = "table"
    JSON = "json"
    NDJSON = "ndjson"
    CSV = "csv"


class Color(StrEnum):
    """When tables are coloured."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Unit(StrEnum):
    """Unit of entropy in tables; records carry both."""

    BITS = "bits"
    NATS = "nats"
