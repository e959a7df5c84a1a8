"""Columns of every record: the keys programs read, the headings and units people read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a record.

    Attributes:
        key: its name in JSON, NDJSON and CSV.
        heading: its name in tables; None for a field that tables leave out.
        unit: what it is measured in, where that is not plain: "nats", "bits".
    """

    key: str
    heading: str | None
    unit: str = ""


INSPECT = (
    Column("source", "file"),
    Column("name", "name"),
    Column("shape", "shape"),
    Column("dtype", "dtype"),
    Column("elements", None),
    Column("bytes", "bytes"),
    Column("n_nan", "nan"),
    Column("n_posinf", "inf"),
    Column("n_neginf", "-inf"),
    Column("min", "min"),
    Column("max", "max"),
    Column("mean", "mean"),
    Column("std", "std"),
)

EXPERIMENT = (
    Column("dk", "d_k"),
    Column("samples", "samples"),
    Column("dist", "dist"),
    Column("keys", "keys"),
    Column("scale", "scale"),
    Column("mean", "mean"),
    Column("mean_theory", "mean theory"),
    Column("var", "var"),
    Column("var_theory", "var theory"),
    Column("var_ci95_low", "95 % from"),
    Column("var_ci95_high", "to"),
    Column("ratio", "ratio"),
    Column("scaled_var", "scaled var"),
    Column("entropy_bits_unscaled", "entropy unscaled", "bits"),
    Column("entropy_bits_scaled", "entropy scaled", "bits"),
    Column("entropy_bits_max", "log2(keys)", "bits"),
    Column("max_weight_unscaled", "largest weight unscaled"),
    Column("max_weight_scaled", "largest weight scaled"),
    Column("softmax_grad_unscaled", "gradient unscaled"),
    Column("softmax_grad_scaled", "gradient scaled"),
    Column("rule", "scale rule"),
    Column("temperature", "temperature"),
    Column("entry_mean", "entry mean"),
    Column("entry_std", "entry std"),
    Column("correlation", "correlation"),
    Column("df", "df"),
    Column("seed", "seed"),
    Column("interval_reason", "no interval because"),
    Column("assumption", "assumption"),
)

AUDIT = (
    Column("source", "file"),
    Column("group", "group"),
    Column("batch", "batch"),
    Column("head", "head"),
    Column("dk", "d_k"),
    Column("cells", "cells"),
    Column("mean", "mean"),
    Column("var", "var"),
    Column("std", "std"),
    Column("var_within_rows", "within rows"),
    Column("var_all_pairs", "all pairs"),
    Column("scale", "scale"),
    Column("scaled_mean", "scaled mean"),
    Column("scaled_var", "scaled var"),
    Column("scaled_std", "scaled std"),
    Column("q_mean_norm", "|q mean|"),
    Column("k_mean_norm", "|k mean|"),
    Column("q_var", "q var"),
    Column("k_var", "k var"),
    Column("var_unit_theory", "unit theory"),
    Column("var_from_interaction", "interaction"),
    Column("var_from_query_mean", "query mean"),
    Column("var_from_key_mean", "key mean"),
    Column("scale_for_unit_variance", "unit scale"),
    Column("diagnosis", "diagnosis"),
)

MASK = (
    Column("batch", "batch"),
    Column("head", "head"),
    Column("q_len", "S_q"),
    Column("k_len", "S_k"),
    Column("cells", "cells"),
    Column("kept", "kept"),
    Column("density", "density"),
    Column("empty_rows", "empty rows"),
    Column("first_empty_rows", None),
    Column("unused_keys", "unused keys"),
    Column("first_unused_keys", None),
    Column("keys_min", "keys min"),
    Column("keys_max", "max"),
    Column("description", None),
)

MASK_CELLS = (
    Column("batch", "batch"),
    Column("head", "head"),
    Column("query", "query"),
    Column("key", "key"),
    Column("a", "this"),
    Column("b", "other"),
)

MASK_EFFECT = (
    Column("batch", "batch"),
    Column("head", "head"),
    Column("query", "query"),
    Column("sum_before", None),
    Column("sum_after", "row sum"),
    Column("entropy_before_nats", "entropy before", "nats"),
    Column("entropy_before_bits", "entropy before", "bits"),
    Column("entropy_after_nats", "after", "nats"),
    Column("entropy_after_bits", "after", "bits"),
    Column("mass_removed", "mass removed"),
    Column("mass_moved", "mass moved"),
    Column("top_before", "top key before"),
    Column("top_after", "after"),
)

FIT_SCALE = (
    Column("source", None),
    Column("scale_used", None),
    Column("name", "scale"),
    Column("scale", "value"),
    Column("rms", "rms residual"),
    Column("max", "largest residual"),
)

HEAD_ENTROPY = (
    Column("source", "file"),
    Column("group", "group"),
    Column("batch", "batch"),
    Column("head", "head"),
    Column("queries", "queries"),
    Column("empty_rows", "empty rows"),
    Column("keys_mean", "keys"),
    Column("entropy_nats_mean", "entropy", "nats"),
    Column("entropy_nats_min", "entropy min", "nats"),
    Column("entropy_nats_max", "entropy max", "nats"),
    Column("entropy_nats_std", "entropy std", "nats"),
    Column("entropy_bits_mean", "entropy", "bits"),
    Column("entropy_normalized_mean", "normalised"),
    Column("effective_keys_mean", "effective keys"),
    Column("max_weight_mean", "largest weight"),
    Column("max_weight_max", "largest weight max"),
    Column("max_logit", "max logit"),
    Column("max_logit_query", "at query"),
    Column("max_logit_key", "at key"),
    Column("logsumexp_mean", "logsumexp"),
    Column("sink_mass_mean", "sink mass"),
    Column("distance_mean", "distance"),
    Column("nonfinite_rows", "non-finite rows"),
    Column("label", "label"),
    Column("label_score", "score"),
    Column("scale", "scale"),
    Column("temperature", "temperature"),
    Column("sink_weight_mean", "sink logit's weight"),
)

# A name that ends in _se is the standard error of the mean beside it; one that begins with
# sampled_ speaks of the rows in the sample alone.
SAMPLED_ENTROPY = (
    *HEAD_ENTROPY,
    Column("sampled_queries", "rows sampled"),
    Column("sampled_empty_rows", "empty among them"),
    Column("sampled_nonfinite_rows", "non-finite among them"),
    Column("sampled_max_logit", "max logit among them"),
    Column("keys_se", "keys ±"),
    Column("entropy_nats_se", "entropy ±", "nats"),
    Column("entropy_bits_se", "entropy ±", "bits"),
    Column("entropy_normalized_se", "normalised ±"),
    Column("effective_keys_se", "effective keys ±"),
    Column("max_weight_se", "largest weight ±"),
    Column("logsumexp_se", "logsumexp ±"),
    Column("sink_mass_se", "sink mass ±"),
    Column("distance_se", "distance ±"),
)

ROW_ENTROPY = (
    Column("source", "file"),
    Column("group", "group"),
    Column("batch", "batch"),
    Column("head", "head"),
    Column("query", "query"),
    Column("keys", "keys"),
    Column("entropy_nats", "entropy", "nats"),
    Column("entropy_bits", "entropy", "bits"),
    Column("entropy_normalized", "normalised"),
    Column("effective_keys", "effective keys"),
    Column("max_weight", "largest weight"),
    Column("top_key", "top key"),
    Column("max_logit", "max logit"),
    Column("logsumexp", "logsumexp"),
    Column("sink_mass", "sink mass"),
    Column("distance", "distance"),
    Column("sink_weight", "sink logit's weight"),
    Column("nonfinite", "non-finite"),
)

KEY_MASS = (
    Column("source", "file"),
    Column("group", "group"),
    Column("batch", "batch"),
    Column("head", "head"),
    Column("key", "key"),
    Column("queries", "queries"),
    Column("mass", "mass"),
    Column("mass_mean", "mean weight"),
)

GROUP_ENTROPY = (
    Column("source", "file"),
    Column("group", "group"),
    Column("heads", "heads"),
    Column("entropy_nats_mean", "entropy", "nats"),
    Column("entropy_bits_mean", "entropy", "bits"),
    Column("entropy_nats_min", "lowest head", "nats"),
    Column("entropy_nats_max", "highest head", "nats"),
    Column("entropy_bits_min", "lowest head", "bits"),
    Column("entropy_bits_max", "highest head", "bits"),
    Column("effective_keys_mean", "effective keys"),
    Column("max_weight_mean", "largest weight"),
    Column("max_logit", "max logit"),
    Column("sink_mass_mean", "sink mass"),
    Column("empty_rows", "empty rows"),
    Column("nonfinite_rows", "non-finite rows"),
    Column("labels", "labels"),
)

CHECK = (
    Column("target", "target"),
    Column("passed", "passed"),
    Column("max_abs_error", "max abs error"),
    Column("max_rel_error", "max rel error"),
    Column("rms_error", "rms error"),
    Column("cosine", "cosine"),
    Column("mismatches", "mismatches"),
    Column("worst_index", "worst at"),
    Column("actual", "actual"),
    Column("expected", "expected"),
    Column("rtol", "rtol"),
    Column("atol", "atol"),
    Column("explanation", None),
    Column("cells", "cells"),
    Column("dtype", "dtype"),
    Column("n_nan", "nan"),
    Column("n_posinf", "inf"),
    Column("n_neginf", "-inf"),
)
