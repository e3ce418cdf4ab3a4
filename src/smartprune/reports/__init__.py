"""Reports: where a model's zeros are, for people."""

from .table import Report, ReportRow, report

__all__ = ["Report", "ReportRow", "report"]
