"""One offline page about runs: what they scored, how they learned, and every head to look into."""

from tamis.report.content import ReportRun, content
from tamis.report.page import page
from tamis.report.show import Explorer, show

__all__ = ["Explorer", "ReportRun", "content", "page", "show"]
