"""The page, live: type a sentence and look into the heads of any model."""
