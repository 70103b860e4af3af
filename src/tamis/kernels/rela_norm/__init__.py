"""The norm of ReLA and its gate."""
