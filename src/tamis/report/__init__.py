"""One page about runs or models: what they scored, how they learned, and every head to look into, offline or live."""

from tamis.report.content import ReportRun, content
from tamis.report.explore import LivePage, explore
from tamis.report.page import page
from tamis.report.show import Explorer, show

__all__ = ["Explorer", "LivePage", "ReportRun", "content", "explore", "page", "show"]
