"""Static views of results: HTML without script, and text."""
