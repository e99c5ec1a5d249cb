"""Statistics of paired benchmarks, as pure functions on arrays. docs/statistics.md explains the choices.

Log ratios are ``ln(candidate / baseline)`` of one metric per pair, signed so that positive is better. numpy only; scipy
is imported inside the two functions that need its special functions.
"""

from __future__ import annotations

from moegate.stats.covariates import CHECKS, Check, void_reason
from moegate.stats.families import (
    Rate,
    adjusted_p,
    at_most,
    benjamini_hochberg,
    clopper_pearson,
    detectable,
    pairs_to_detect,
)
from moegate.stats.launches import log_ratio, roles, samples_of, value_of
from moegate.stats.paired import DifferentSamples, PairedAccuracy, accuracy_non_inferiority, mcnemar
from moegate.stats.power import minimum_detectable_effect, more_pairs, pair_sd
from moegate.stats.schedule import Order, Turn, schedule, turns
from moegate.stats.signedrank import (
    Interval,
    equivalence_p,
    hodges_lehmann,
    interval,
    intervals,
    one_sided_p,
    walsh_averages,
)
from moegate.stats.stages import (
    CellPairs,
    Decision,
    Next,
    Rules,
    cells_to_confirm,
    confirm_decision,
    decide,
    futile,
    next_stage,
    rules_of,
    screen_decision,
)
from moegate.stats.twosample import shift, two_sample_p

__all__ = [
    "CHECKS",
    "CellPairs",
    "Check",
    "Decision",
    "DifferentSamples",
    "Interval",
    "Next",
    "Order",
    "PairedAccuracy",
    "Rate",
    "Rules",
    "Turn",
    "accuracy_non_inferiority",
    "adjusted_p",
    "at_most",
    "benjamini_hochberg",
    "cells_to_confirm",
    "clopper_pearson",
    "confirm_decision",
    "decide",
    "detectable",
    "equivalence_p",
    "futile",
    "hodges_lehmann",
    "interval",
    "intervals",
    "log_ratio",
    "mcnemar",
    "minimum_detectable_effect",
    "more_pairs",
    "next_stage",
    "one_sided_p",
    "pair_sd",
    "pairs_to_detect",
    "roles",
    "rules_of",
    "samples_of",
    "schedule",
    "screen_decision",
    "shift",
    "turns",
    "two_sample_p",
    "value_of",
    "void_reason",
    "walsh_averages",
]
