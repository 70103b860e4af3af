"""Gone: `tamis.experiments` has what was here."""

raise ImportError(
    "tamis.task_runs is gone: read_task_recipe is read_recipe, train_task train, evaluate_task evaluate, "
    "task_heads heads, task_dispersion dispersion, plot_tasks plot_lengths and TaskRecipe "
    "GeneratedSequences of tamis.experiments"
)
