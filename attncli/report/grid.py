"""Other names of `report.table`, until nobody uses them."""

from attncli.report.prose import aligned as aligned
from attncli.report.prose import shortened as shortened
from attncli.report.prose import text_width as text_width
from attncli.report.table import TableColumn as GridColumn
from attncli.report.table import table as grid

__all__ = ["GridColumn", "aligned", "grid", "shortened", "text_width"]
