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


class PageTheme(StrEnum):
    """Colours of a page; auto is what the reader's system asks for."""

    AUTO = "auto"
    LIGHT = "light"
    DARK = "dark"


class Language(StrEnum):
    """Language of a page."""

    EN = "en"
    ZH = "zh"
