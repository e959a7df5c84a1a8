"""Words of command lines: every option that commands declare, with values, fitting and not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, get_args, get_type_hints

from chance import NUMBERS, Chance
from folder import FILES, TARGETS

from attncli.analysis.options import AttentionWords
from attncli.attention.options import OPTIONS, Kind, Told
from attncli.cli.commands import COMMANDS
from attncli.errors import option_name

OTHER_DIGITS = ("٣", "３", "०.५", "-४", "1٣", "٣,٤", "１e２")
ODD = (
    "",
    " ",
    "x",
    "-",
    "--",
    "nan",
    "NaN",
    "inf",
    "-inf",
    "1e400",
    "1e-400",
    "0x10",
    "1_000",
    "+1",
)
CODES = (
    "\x1b[31m",
    "a\nb",
    "\r",
    "\x9b1m",
    "\u202e",
    "\x7f",
    "é",
    "\udcff",
    "«scale»",
    "[red]x[/]",
)
LONG = ("9" * 5000, "x" * 300, "x" * 5000, "0," * 3000, "1/" * 500, ",", "1,,2", "{", "[1]", "%s")
WRONG = (*ODD, *CODES, *LONG, *OTHER_DIGITS)
# No size between those that take no time and those that no machine has room for.
_SMALL = ("0", "1", "2", "3", "5", "7", "8", "-1")
WHOLE = (*_SMALL * 5, *(str(n) for n in NUMBERS if abs(n) >= 2**53))
REAL = ("0", "0.5", "1", "-1", "2", "1e-3", "1e30", "1e-300", "-0.0", "1e308", "0.125")
LISTS = ("0", "0,1", "1,0,-1", "0,0,0,1,1,2,2", "1,1,1,1,1,0,0", "0,3,7", "3,5", "1/2", "2,99", "7")
NAMES = {
    "stage": ("scores", "scaled", "capped", "masked", "weights", "output", "projected", "all", "x"),
    "grid": ("entropy_bits_mean", "kl_nats_mean", "label", "max_weight_mean", "x", "queries"),
    "sort": ("kl_nats_max", "head", "output_rel_error", "x", "what_if"),
    "fail_on": (
        "collapsed",
        "nan",
        "max-logit=1",
        "kl=0.1",
        "empty-rows",
        "leak",
        "unused-keys",
        "x=1",
    ),
    "label_limit": ("local=0.5", "sink=1", "x=1", "uniform=nan", "collapsed="),
    "what_if": (
        *("scale=1", "left-window=2", "k-dtype=int8", "v-dtype=float8_e4m3fn", "sinks=none"),
        *("causal=x",),
        *("keep-keys=first:1,last:2", "keep-keys=heavy:2", "k-dtype=int4:token", "x=1", "="),
        *("scale=",),
        *("temperature=0", "causal=true", "keep-keys=first:99999999999999999999", "scale=nan"),
    ),
    "dk": ("4", "1:8", "2:32:x2", "1:5:+2", "8:1", "1:9:x1", "0", "1:99999999999999999999:+1"),
    "scale_rule": ("sqrt", "linear", "none", "log-n", "0.5", "nan"),
    "logits": ("1,2,3", "1000,1001", "-1e308,1e308", "0", "1e400"),
    "temperatures": ("1", "0.5,2", "0", "1e-320", "1e308"),
    "labels": ("labels.txt", "a,b,c,d,e,f,g", "the,cat", "absent.txt", "q.npy"),
    "group": ("layers.0", "layers.0,layers.1", "x", "", "*"),
    "dtype": (
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "int8",
        "complex64",
        "float8_e4m3fn",
        "x",
    ),
    "device": ("cpu", "auto", "cuda", "cuda:99", "meta", "x", "cpu:1", "mps"),
    "max_size": ("3MB", "1", "0", "-1MB", "1e9GB", "x", "100kB", "1 KB"),
    "title": ("Heads", "<script>alert(1)</script>", "{{ 1 }}"),
    "text": ("Hello",),
    "query_offset": ("top-left", "bottom-right", "middle", "2", "0,1", "-3"),
    "samples": ("100", "8", "0", "-1", str(10**30)),
    "keys": ("1", "8", "0", "-1", str(10**30)),
    "model": ("absent/model", "folder", "bad.npy", "", "../x"),
    "generate": ("1",),
}
# What takes long, or goes with few other options.
RARE = {
    *("plot", "trace", "q", "k", "v", "x", "wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo", "qkv"),
    *("weights", "weights_layout", "batch", "q_len", "k_len", "dk", "dv", "seed", "other_q"),
    *("other_k",),
}
HEAVY = {"capture": 0.05, "report": 0.05, "check": 1}


@dataclass(frozen=True, slots=True)
class Word:
    """An option or argument of a command, and what it may be given."""

    field: str
    told: Told
    hint: Any  # the type of its field
    is_needed: bool

    @property
    def names(self) -> tuple[str, ...]:
        """How it is typed."""
        return self.told.names or (option_name(self.field),)

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return self.hint is bool

    def takes(self, *kinds: type) -> bool:
        """Whether its value is of such a type."""
        return any(kind in (self.hint, *get_args(self.hint)) for kind in kinds)

    def values(self) -> Sequence[str]:
        """What fits it, more or less."""
        metavar = self.told.metavar or ""
        choices = [kind for kind in (self.hint, *get_args(self.hint)) if _is_choice(kind)]
        if self.field in ("output", "save", "plot"):
            return TARGETS[self.field]
        if self.field in NAMES:
            return NAMES[self.field]
        if choices:
            return tuple(choices[0])
        if "FILE" in metavar:
            return FILES if metavar.startswith("FILE[") or "|" not in metavar else (*FILES, *LISTS)
        if self.takes(int):
            return WHOLE
        return REAL if self.takes(float) else LISTS


def _is_choice(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, StrEnum)


_NUMBERS = (Kind.NUMBERS, Kind.OFFSET, Kind.LENGTHS, Kind.IDS, Kind.MARKS, Kind.LOGITS)
_HINTS: dict[Kind | None, Any] = {Kind.NUMBER: float, Kind.WHOLE: int, Kind.FLAG: bool}


def words_of(command: Callable[..., None]) -> list[Word]:
    """The options of a command, as its declaration has them."""
    groups = get_type_hints(command)
    groups.pop("return")
    found = []
    for kind in groups.values():
        if kind is AttentionWords:
            for name, told in OPTIONS.items():
                found.append(Word(name, told, _HINTS.get(told.kind, list[str]), False))
            continue
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            told = field.metadata["told"]
            needed = field.default is dataclasses.MISSING
            found.append(Word(field.name, told, hints[field.name], needed))
    return found


WORDS = {name: words_of(command) for name, command in COMMANDS.items()}
INPUTS = (
    ["q.npy", "k.npy", "v.npy"],
    ["b.npz"],
    ["layers.safetensors"],
    ["dump.pt"],
    ["sample"],
    [],
)


def random_line(chance: Chance) -> list[str]:
    """A command, its inputs and up to five options, of which most fit."""
    weights = [HEAVY.get(name, 4) for name in COMMANDS]
    command = chance.choices(tuple(COMMANDS), weights)[0]
    words = WORDS[command]
    line = []
    for word in words:
        if word.told.positional or word.is_needed:
            line += _given(chance, word)
    if command == "compare" and chance.random() < 0.7:
        line = [chance.choice(("b.npz", "layers.safetensors", "dump.pt", "sample"))]
    if command == "inspect" and not line:
        line = ["q.npy"]
    if command == "check":
        line += ["--actual-output", chance.choice(("q.npy", "q.npy", "b.npz::q", "v.npy"))]
    if command == "compare":
        line += chance.choice((["--what-if", chance.choice(NAMES["what_if"])], ["b.npz"]))
    count = chance.choice((0, 0, 1, 1, 1, 2, 2, 3, 5))
    chosen = chance.sample(words, min(len(words), count))
    for word in chosen:
        if not word.told.positional and (word.field not in RARE or chance.random() < 0.2):
            line += _option(chance, word)
    if chance.random() < 0.3:
        line += ["--format", chance.choice(("json", "ndjson", "csv", "table"))]
    line.insert(
        0, chance.amiss(command, ("", "comput", "\x1b[31m", "-", "--version", "٣", "x" * 5000))
    )
    line = _shaken(chance, line)
    # Who asks for files beside the folder gets them.
    outside = {"/", ".."} & set(targets_of(line))
    return random_line(chance) if outside else line


def _given(chance: Chance, word: Word) -> list[str]:
    if not word.told.positional:
        return _option(chance, word)
    if word.field != "files":
        return [chance.amiss(chance.choice(word.values()), WRONG)]
    if chance.random() < 0.2:
        return chance.choices(FILES, k=chance.randint(1, 3))
    return list(chance.choice(INPUTS))


def _option(chance: Chance, word: Word) -> list[str]:
    name = chance.choice(word.names)
    if word.is_flag:
        negated = word.told.kind is Kind.FLAG and chance.random() < 0.2
        return [f"--no-{name[2:]}" if negated else name]
    wrong = WRONG if word.field in TARGETS else (*WRONG, *FILES)
    value = str(chance.amiss(chance.choice(word.values()), wrong))
    return [f"{name}={value}"] if name[:2] == "--" and chance.random() < 0.2 else [name, value]


def _shaken(chance: Chance, line: list[str]) -> list[str]:
    """The words with one of them missing, there twice, or another one among them."""
    if chance.random() >= chance.rate:
        return line
    at = chance.randrange(len(line) + 1)
    odd = chance.choice((*CODES, *(f"--{code}" for code in CODES), "-h", "--help", "-z", "--heads"))
    return chance.choice((line[:at] + line[at + 1 :], line[:at] + line[at:] * 2, [*line, odd]))


def targets_of(words: Sequence[str]) -> Iterator[str]:
    """What a command line names as files to write."""
    for at, word in enumerate(words):
        option, _, value = word.partition("=")
        if option in ("--output", "--save", "--plot", "-o"):
            yield value if "=" in word else (words[at + 1] if at + 1 < len(words) else "")
        elif word.startswith("-o"):
            yield word[2:]


def has_other_digits(words: Sequence[str]) -> bool:
    """Whether an option that takes numbers is given some of another script."""
    numbers = {
        name
        for word in WORDS.get(words[0] if words else "", ())
        if word.takes(int, float) or word.told.kind in _HINTS or word.told.kind in _NUMBERS
        for name in word.names
    }
    return any(option in numbers and value in OTHER_DIGITS for option, value in pairwise(words))
