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


# What stands in for a character that the output's encoding lacks.
FALLBACKS = str.maketrans(
    {"√": "sqrt ", "ᵀ": "^T", "·": "*", "…": "...", "–": "-", "−": "-", "Σ": "sum ", "×": "x"}
    | {"≤": "<=", "≥": ">=", "→": "->", "²": "^2", "ₖ": "_k", "ₕ": "_h", "∞": "inf", "τ": "T"}
    | {"≈": "~", "█": "#", "▓": "#", "▒": "+", "░": ".", "½": "1/2", "ᵢ": "_i", "ⱼ": "_j"}
    | {"⁴": "^4", "ρ": "rho", "κ": "kappa"}
    | {"≠": "!=", "σ": "sigma", "μ": "mu", "⌊": "[", "⌋": "]", "▀": "^", "▄": "_", "∈": "in"}
    | {"±": "+-", "─": "-", "′": "'", "←": "<-"}
)
