"""Gone: `tamis.experiments` has what was here."""

raise ImportError(
    "tamis.runs is gone: prepare_run, train_run, evaluate_run, analyze_run, compare_runs, report_runs and"
    " plot_runs are prepare, train, evaluate, analyze, compare, report and plot of tamis.experiments"
)
