"""Models of transformers: loaded from where they are, with texts as they take them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from attncli.errors import DataError, UsageError
from attncli.files.reader import open_file
from attncli.files.text import is_file, is_folder, listed, shown
from attncli.files.torch_tensors import as_torch, torch_dtype
from attncli.recording.capture import Capture

Rows = list[list[str]]

# What transformers raises where files are not what they should be.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)
# What a model raises of inputs that it does not take.
_REFUSED = (ValueError, TypeError, KeyError, IndexError)


@dataclass(frozen=True, slots=True)
class Run:
    """One pass through a model.

    Attributes:
        name: before the names of its groups; "" where it is the only one.
        inputs: keywords of the model's forward.
        labels: the tokens, a row for each batch; None for none.
    """

    name: str
    inputs: dict[str, torch.Tensor]
    labels: Rows | None


@dataclass(frozen=True, slots=True)
class Model:
    """A model, ready to run.

    Attributes:
        source: as its user named it.
        module: in evaluation mode.
        tokenizer: None where it has none.
        warnings: what it lacks.
    """

    source: str
    module: Any
    tokenizer: Any
    warnings: tuple[str, ...] = ()

    @property
    def is_two_sided(self) -> bool:
        """Whether it is an encoder–decoder."""
        return bool(getattr(self.module.config, "is_encoder_decoder", False))

    def text_runs(
        self, texts: Sequence[str], *, batch: bool, max_length: int | None, generates: bool
    ) -> list[Run]:
        """A pass for each text, or one for all of them, padded.

        Raises:
            DataError: the model has no tokenizer, or takes no text that long.
        """
        if self.tokenizer is None:
            problem = "expected a tokenizer beside the model for «text», got none"
            raise DataError(shown(self.source), problem, "«ids» gives the tokens themselves")
        if batch:
            return [self._tokenized("", list(texts), max_length, generates)]
        several = len(texts) > 1
        return [
            self._tokenized(f"texts.{n}" if several else "", [text], max_length, generates)
            for n, text in enumerate(texts)
        ]

    def _tokenized(
        self, name: str, texts: list[str], max_length: int | None, generates: bool
    ) -> Run:
        tokenizer, fast = self.tokenizer, getattr(self.tokenizer, "is_fast", False)
        if len(texts) > 1 and tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise DataError("«batch»", "expected a tokenizer that can pad, got one without")
            tokenizer.pad_token = tokenizer.eos_token
        found = tokenizer(
            texts,
            return_tensors="pt",
            padding=len(texts) > 1,
            padding_side="left" if generates and not self.is_two_sided else "right",
            truncation=max_length is not None,
            max_length=max_length,
            return_offsets_mapping=fast,
        )
        ids = found["input_ids"]
        spans = (
            found.pop("offset_mapping").tolist() if fast else [[None] * ids.shape[-1]] * len(texts)
        )
        self._require_room(ids.shape[-1], "«text»", "«max_length={}» cuts it")
        rows = [
            [self._word(token, text, span) for token, span in zip(row, of_text, strict=True)]
            for row, text, of_text in zip(ids.tolist(), texts, spans, strict=True)
        ]
        return Run(name, dict(found), rows)

    def _word(self, token: int, text: str, span: list[int] | None) -> str:
        """A token as people read it: what it stands for in the text, or its own name."""
        if span is not None and span[0] < span[1]:
            return text[span[0] : span[1]]
        if token in self.tokenizer.all_special_ids:
            return str(self.tokenizer.convert_ids_to_tokens(token))
        said = self.tokenizer.decode([token])
        broken = "\N{REPLACEMENT CHARACTER}" in said or not said
        return str(self.tokenizer.convert_ids_to_tokens(token) if broken else said)

    def words(self, ids: torch.Tensor) -> Rows:
        """Tokens without a text, one by one; their numbers where there is no tokenizer."""
        if self.tokenizer is None:
            return [[str(token) for token in row] for row in ids.tolist()]
        return [[self._word(token, "", None) for token in row] for row in ids.tolist()]

    def ids_run(self, path: str) -> Run:
        """A pass over token ids of a file: an array, or words of a text.

        Raises:
            DataError: they are no whole numbers, or too many.
        """
        ids = _ids_in(path)
        self._require_room(ids.shape[-1], shown(path), "")
        return Run("", {"input_ids": ids}, self.words(ids))

    def inputs_run(self, path: str) -> Run:
        """A pass over the arrays of a file, by their names.

        Raises:
            DataError: the file cannot be read.
        """
        file = open_file(path)
        found = {str(one.name): as_torch(file.read(one.name)) for one in file.headers}
        dtype = self.module.dtype
        inputs = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor.long()
            for name, tensor in found.items()
        }
        ids = inputs.get("input_ids")
        return Run("", inputs, None if ids is None or ids.ndim != 2 else self.words(ids))

    def _require_room(self, length: int, where: str, advice: str) -> None:
        if not length:
            raise DataError(where, "expected a token at least, got none")
        most = getattr(self.module.config, "max_position_embeddings", None)
        if isinstance(most, int) and length > most > 0:
            # Tables of positions that begin behind that of padding have two rows more.
            raise DataError(
                where, f"expected at most {most} tokens, got {length}", advice.format(most)
            )

    @torch.inference_mode()
    def run(self, run: Run, capture: Capture, *, generate: int | None) -> None:
        """Run the model under the eyes of a capture.

        Raises:
            DataError: it does not take these inputs.
        """
        capture.begin_text(run.name, run.labels, self._decoder_words(run))
        inputs = {name: tensor.to(self.module.device) for name, tensor in run.inputs.items()}
        try:
            if generate is None:
                self.module(**inputs)
                return
            wanted = {"max_new_tokens": generate + 1, "min_new_tokens": generate + 1}
            pad = getattr(self.tokenizer, "pad_token_id", None)
            ids = self.module.generate(**inputs, **wanted, do_sample=False, pad_token_id=pad)
        except _REFUSED as error:
            raise self._refusal(inputs, error) from error
        self._label_steps(run, capture, ids)

    def _label_steps(self, run: Run, capture: Capture, ids: torch.Tensor) -> None:
        """Say the tokens that the model went on with; the last is never fed to it again."""
        if self.is_two_sided:
            capture.label(run.name, None, self.words(ids[:, :-1]))
            return
        known = run.labels or []
        rest = self.words(ids[:, run.inputs["input_ids"].shape[-1] : -1])
        capture.label(run.name, [[*row, *more] for row, more in zip(known, rest, strict=True)])

    def _decoder_words(self, run: Run) -> Rows | None:
        ids = run.inputs.get("decoder_input_ids")
        return None if ids is None else self.words(ids)

    def _refusal(self, inputs: Mapping[str, Any], error: Exception) -> DataError:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = "«inputs» gives it arrays by the names of its keywords"
        if self.is_two_sided and "decoder_input_ids" not in inputs:
            advice = "an encoder–decoder: «inputs» with decoder_input_ids too, or «generate»"
        name = type(self.module).__name__
        return DataError(
            shown(self.source), f"expected inputs that {name} takes, got: {shown(text)}", advice
        )


def load(source: str, *, dtype: str | None, device: torch.device, generates: bool) -> Model:
    """Load a model and its tokenizer; code of its own is never run.

    Args:
        source: a folder, a .gguf file, or a name on the hub.
        dtype: to run it in; None for the stored one.
        device: where to run it.
        generates: whether it is to go on with a text.

    Raises:
        DataError: there is no such model, or none that transformers reads.
        UsageError: what reads the file is not installed.
    """
    for library in ("transformers", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.CRITICAL)  # what is wrong is raised, too
    place, options = _place(source)
    options |= {"trust_remote_code": False}
    kind = "auto" if dtype is None else torch_dtype(dtype)
    try:
        config = transformers.AutoConfig.from_pretrained(place, **options)
        config.use_cache = generates
        maker = transformers.AutoModel
        if generates:
            two_sided = getattr(config, "is_encoder_decoder", False)
            usual = "AutoModelForSeq2SeqLM" if two_sided else "AutoModelForCausalLM"
            named = (config.architectures or [usual])[0]
            maker = getattr(transformers, named, getattr(transformers, usual))
        module, told = maker.from_pretrained(
            place, config=config, dtype=kind, output_loading_info=True, **options
        )
    except _UNREADABLE as error:
        raise _unreadable(source, error) from error
    warnings: tuple[str, ...] = ()
    if lacking := sorted(told["missing_keys"]):  # which transformers draws at random
        some = listed(lacking, 3)
        warnings = (f"{shown(source)}: random numbers stand for the weights it lacks: {some}",)
    return Model(source, module.eval().to(device), _tokenizer(place, options), warnings)


def _tokenizer(place: str, options: dict[str, Any]) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(place, **options)
    except _UNREADABLE:
        return None


def _place(source: str) -> tuple[str, dict[str, Any]]:
    """The folder or name that transformers is given, and the file in it if it is GGUF."""
    path = Path(source).expanduser()
    if is_folder(path) and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            got = f"{len(files)} .gguf files" if files else "neither"
            problem = f"expected config.json or one .gguf file in it, got {got}"
            raise DataError(shown(source), problem)
        path = files[0]
    if is_file(path) and path.suffix.lower() == ".gguf":
        for needed in ("gguf", "accelerate"):
            if find_spec(needed) is None:
                problem = f"expected {needed} to be installed for GGUF, got none"
                raise UsageError("MODEL", problem, "pip install gguf accelerate")
        return str(path.parent), {"gguf_file": path.name}
    if is_folder(path):
        return str(path), {}
    if os.path.exists(path):  # noqa: PTH110 - a name may be too long for one
        raise DataError(shown(source), "expected a folder or a .gguf file, got another file")
    if source.count("/") > 1 or source.startswith((".", "/", "~")) or path.suffix == ".gguf":
        raise DataError(shown(source), "expected a folder of a model, got nothing of this name")
    return source, {}


def _unreadable(source: str, error: Exception) -> DataError:
    """What transformers says, in one line of our own."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        problem = "expected an architecture that transformers has, got one with code of its own"
        return DataError(shown(source), problem, "such code is never run")
    local = os.path.exists(Path(source).expanduser())  # noqa: PTH110
    if isinstance(error, OSError) and not local:
        offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        advice = "HF_HUB_OFFLINE is set, so only the cache was searched" if offline else ""
        problem = "expected a model in the hub's cache or on the hub, got none of this name"
        return DataError(shown(source), problem, advice or "or the hub could not be reached")
    problem = f"expected a model that transformers reads, got: {shown(text, 160)}"
    return DataError(shown(source), problem)


def _ids_in(path: str) -> torch.Tensor:
    """Token ids, (B, S)."""
    wanted = "expected token ids, (S) or (B, S) whole numbers"
    if Path(path).suffix.lower() in (".txt", ".ids", ""):
        try:
            words = Path(path).read_text(encoding="utf-8").replace(",", " ").split()
            ids = torch.tensor([[int(word) for word in words]])
        except OSError as error:
            raise DataError(
                shown(path), f"expected a file of token ids, got: {error.strerror}"
            ) from None
        except ValueError:
            raise DataError(shown(path), f"{wanted}, got other words") from None
    else:
        file = open_file(path)
        ids = as_torch(file.read(file.find(None).name))
    if ids.is_floating_point() or ids.ndim not in (1, 2) or not ids.numel():
        got = f"{tuple(ids.shape)} of {str(ids.dtype).removeprefix('torch.')}"
        raise DataError(shown(path), f"{wanted}, got {got}")
    return ids.long().reshape(-1, ids.shape[-1])
