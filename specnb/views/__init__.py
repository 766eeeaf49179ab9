"""Views of results: static HTML, plain text, tables and plots."""
