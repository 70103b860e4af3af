"""Gone: `tamis.experiments` has what was here."""

raise ImportError(
    "tamis.config is gone: read_recipe, arms_of and read_settings are those of tamis.experiments, and "
    "Recipe is its Translation"
)
