"""Other names of `report.table`, until nobody uses them."""

from attncli.report.table import cell as cell
from attncli.report.table import record_table as record_table

# Columns that name a record: where a table is split to fit, each part has them.
KEYS = frozenset({"source", "name", "group", "batch", "head", "query", "key", "stage", "dk"})
