"""The columns of records that say what becomes of heads, keys and groups: without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncli.analysis.head_columns import GroupPlace
from attncli.columns import column, columns_of

if TYPE_CHECKING:
    import torch

WORDS_OF_HEADS = ("what_if", "label_a", "label_b")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadComparison:
    """What one head's attention A becomes in B; means are over the rows that see keys on both.

    None stands for what there is not, NaN for what NaN and infinities in the input made of it.
    """

    batch: int = column("batch", is_key=True, description="its index")
    head: int = column("head", is_key=True, description="index of the query head")
    what_if: str | None = column(
        "what if", is_key=True, description="what B is of A; none between two inputs"
    )
    queries: int = column(None, description="queries that are real on both sides")
    kl_nats_mean: float | None = column(
        "KL", unit="nats", description="mean of KL(A‖B) = Σ a ln(a/b) ≥ 0, where it is finite"
    )
    kl_nats_max: float | None = column(
        "largest KL", unit="nats", description="largest KL(A‖B) of a row where it is finite"
    )
    kl_max_query: int | None = column(
        "at query", description="query where kl_nats_max stands first"
    )
    kl_bits_mean: float | None = column("KL", unit="bits", description="kl_nats_mean / ln 2")
    kl_bits_max: float | None = column("largest KL", unit="bits", description="kl_nats_max / ln 2")
    infinite_kl_rows: int = column(
        "hidden rows", description="rows of A of which B hides a key: their KL is infinite"
    )
    js_nats_mean: float | None = column(
        "JS", unit="nats", description="mean Jensen–Shannon divergence, 0 to ln 2"
    )
    js_nats_max: float | None = column(
        None, unit="nats", description="largest Jensen–Shannon divergence of a row"
    )
    tv_mean: float | None = column(
        "TV", description="mean total variation ½ Σ |a − b| of the weights, 0 to 1"
    )
    tv_max: float | None = column(None, description="largest total variation of a row")
    mass_lost_mean: float | None = column(
        "mass lost",
        description="mean of A's weight on keys that B hides, 0 to 1, over all rows in which A "
        "sees a key",
    )
    top_key_agreement: float | None = column(
        "same top key", description="share of the rows whose heaviest key is the same, 0 to 1"
    )
    entropy_nats_a: float | None = column(
        None, unit="nats", description="mean entropy of A, over its own rows that see a key"
    )
    entropy_nats_b: float | None = column(None, unit="nats", description="the same of B")
    entropy_nats_change: float | None = column(
        "entropy change", unit="nats", description="entropy_nats_b − entropy_nats_a"
    )
    entropy_bits_change: float | None = column(
        "entropy change", unit="bits", description="entropy_nats_change / ln 2"
    )
    max_logit_a: float | None = column(None, description="largest visible logit of A")
    max_logit_b: float | None = column(None, description="largest visible logit of B")
    label_a: str | None = column(None, description="what the head does in A, as entropy labels it")
    label_b: str | None = column(None, description="what the head does in B")
    output_rel_error: float | None = column(
        "output error",
        description="‖O_B − O_A‖ / ‖O_A‖ over the head, Frobenius; none without V on both sides",
    )
    output_cosine_min: float | None = column(
        "lowest cosine",
        description="lowest cosine, −1 to 1, of a row of O_A and that of O_B, neither of them 0",
    )
    empty_rows_a: int = column(None, description="rows of A that see no key")
    empty_rows_b: int = column(None, description="rows of B that see no key")
    nonfinite_rows: int = column(
        "non-finite rows", description="rows whose weights are NaN on a side"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyComparison:
    """What one key's weight in a row becomes."""

    batch: int = column("batch", is_key=True, description="its index")
    head: int = column("head", is_key=True, description="index of the query head")
    what_if: str | None = column(
        "what if", is_key=True, description="what B is of A; none between two inputs"
    )
    query: int = column("query", is_key=True, description="the row that changed most")
    key: int = column("key", description="index of the key")
    token: str | None = column("token", description="its token, where it is known")
    weight_a: float = column("weight", description="its weight in A, 0 to 1")
    weight_b: float = column("in B", description="its weight in B, 0 to 1")
    change: float = column("change", description="weight_b − weight_a")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupComparison:
    """The heads of a group: means over them, and extremes."""

    what_if: str | None = column(
        "what if", is_key=True, description="what B is of A; none between two inputs"
    )
    heads: int = column("heads", description="records of heads: batches × heads")
    kl_nats_mean: float | None = column(
        "KL", unit="nats", description="mean over the heads of their mean KL(A‖B) ≥ 0"
    )
    kl_nats_max: float | None = column(
        "largest KL", unit="nats", description="largest finite KL of a row of any head"
    )
    kl_bits_mean: float | None = column("KL", unit="bits", description="kl_nats_mean / ln 2")
    kl_bits_max: float | None = column("largest KL", unit="bits", description="kl_nats_max / ln 2")
    kl_max_head: int | None = column("of head", description="the head of the largest KL")
    infinite_kl_rows: int = column(
        "hidden rows", description="rows of all heads of which B hides a key"
    )
    js_nats_mean: float | None = column(
        "JS", unit="nats", description="mean over the heads of the Jensen–Shannon divergence"
    )
    tv_mean: float | None = column(
        "TV", description="mean over the heads of total variation, 0 to 1"
    )
    tv_max: float | None = column(None, description="largest total variation of a row of any head")
    mass_lost_mean: float | None = column(
        "mass lost", description="mean over the heads of A's weight on keys that B hides"
    )
    top_key_agreement: float | None = column(
        "same top key", description="mean over the heads of the share of rows with the same top key"
    )
    entropy_nats_change: float | None = column(
        "entropy change", unit="nats", description="mean over the heads of B's entropy minus A's"
    )
    entropy_bits_change: float | None = column(
        "entropy change", unit="bits", description="entropy_nats_change / ln 2"
    )
    output_rel_error: float | None = column(
        "output error", description="mean over the heads of ‖O_B − O_A‖ / ‖O_A‖; none without V"
    )
    output_rel_error_max: float | None = column("largest", description="largest of any head")
    output_cosine_min: float | None = column(
        "lowest cosine", description="lowest cosine of a row of O_A and that of O_B of any head"
    )
    labels_changed: int = column("other labels", description="heads with another label in B")
    nonfinite_rows: int = column(
        "non-finite rows", description="rows of all heads whose weights are NaN on a side"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowComparison:
    """What rows become, (R,) each; a value is NaN, or −1 for a key, where a row has none."""

    query: torch.Tensor = column("query", is_key=True, description="index of the query", holds=int)
    keys_a: torch.Tensor = column("keys", description="visible keys of A", holds=int)
    keys_b: torch.Tensor = column("in B", description="visible keys of B", holds=int)
    kl_nats: torch.Tensor = column(
        "KL",
        unit="nats",
        description="KL(A‖B) = Σ a ln(a/b) ≥ 0, infinite where B hides a key of A",
        holds=float | None,
    )
    kl_bits: torch.Tensor = column(
        "KL", unit="bits", description="kl_nats / ln 2", holds=float | None
    )
    infinite_kl: torch.Tensor = column(None, description="whether KL is infinite", holds=bool)
    js_nats: torch.Tensor = column(
        "JS", unit="nats", description="Jensen–Shannon divergence, 0 to ln 2", holds=float | None
    )
    tv: torch.Tensor = column(
        "TV", description="total variation ½ Σ |a − b|, 0 to 1", holds=float | None
    )
    mass_lost: torch.Tensor = column(
        "mass lost", description="A's weight on keys that B hides, 0 to 1", holds=float | None
    )
    top_key_a: torch.Tensor = column(
        "top key", description="the heaviest key of A", holds=int | None
    )
    top_key_b: torch.Tensor = column(
        "top key in B", description="the heaviest key of B", holds=int | None
    )
    entropy_nats_a: torch.Tensor = column(
        "entropy", unit="nats", description="entropy of A's weights", holds=float | None
    )
    entropy_nats_b: torch.Tensor = column(
        "entropy in B", unit="nats", description="entropy of B's weights", holds=float | None
    )
    max_logit_a: torch.Tensor = column(
        None, description="largest visible logit of A", holds=float | None
    )
    max_logit_b: torch.Tensor = column(
        None, description="largest visible logit of B", holds=float | None
    )
    output_rel_error: torch.Tensor | None = column(
        "output error",
        description="‖o_B − o_A‖ / ‖o_A‖; none without V on both sides",
        holds=float | None,
    )
    output_cosine: torch.Tensor | None = column(
        "cosine", description="of o_A and o_B, −1 to 1; none where one is 0", holds=float | None
    )


HEAD = columns_of(GroupPlace, HeadComparison)
KEY = columns_of(GroupPlace, KeyComparison)
GROUP = columns_of(GroupPlace, GroupComparison)
NUMBERS_OF_HEADS = tuple(each for each in HEAD if not (each.is_key or each.key in WORDS_OF_HEADS))
OF_A_HEAD = (*columns_of(GroupPlace), *columns_of(HeadComparison)[:3])
ROW = (*OF_A_HEAD, *columns_of(RowComparison))
