"""Models that travel: from the folders of others into ours, and from ours into graphs that run without Python."""
