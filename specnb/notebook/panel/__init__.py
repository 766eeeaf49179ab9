"""The panel of widgets: `specnb.Panel` and `%specpanel`."""

from specnb.notebook.panel.panel import Panel

__all__ = ["Panel"]
