"""Columns of every record: the keys programs read, the headings and units people read."""

from __future__ import annotations

from attncli.columns import Column as Column

HEAD_ENTROPY = (
    Column("source", "file", is_key=True),
    Column("group", "group", is_key=True),
    Column("batch", "batch", is_key=True),
    Column("head", "head", is_key=True),
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
    Column("source", "file", is_key=True),
    Column("group", "group", is_key=True),
    Column("batch", "batch", is_key=True),
    Column("head", "head", is_key=True),
    Column("query", "query", is_key=True),
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
    Column("source", "file", is_key=True),
    Column("group", "group", is_key=True),
    Column("batch", "batch", is_key=True),
    Column("head", "head", is_key=True),
    Column("key", "key", is_key=True),
    Column("queries", "queries"),
    Column("mass", "mass"),
    Column("mass_mean", "mean weight"),
)

GROUP_ENTROPY = (
    Column("source", "file", is_key=True),
    Column("group", "group", is_key=True),
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
