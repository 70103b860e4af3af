"""Gone: `tamis.experiments` has what was here."""

raise ImportError(
    "tamis.language_runs is gone: read_language_recipe is read_recipe, prepare_language prepare, "
    "train_language train, evaluate_language evaluate, language_dispersion dispersion, plot_language plot"
    " and LanguageRecipe LanguageModel of tamis.experiments"
)
