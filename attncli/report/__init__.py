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


class ColourScale(StrEnum):
    """How weights become colours; numbers of both signs have 0 in the middle, always."""

    LOG = "log"
    SQRT = "sqrt"
    LINEAR = "linear"
    EVEN = "even"


class Pooling(StrEnum):
    """What a point of a picture is of the cells that it stands for."""

    MEAN = "mean"
    MAX = "max"
