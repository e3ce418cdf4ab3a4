"""Reports on pruned models: tables, figures and HTML pages."""

from .table import Report, ReportRow, report

__all__ = ["Report", "ReportRow", "report"]
