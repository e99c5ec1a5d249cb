"""The view model: a run as the pages, files and summaries show it, decided before any template runs."""

from __future__ import annotations

from reports.view.detail import Budget
from reports.view.joined import Joined, join
from reports.view.page import Page, build_page

__all__ = ["Budget", "Joined", "Page", "build_page", "join"]
