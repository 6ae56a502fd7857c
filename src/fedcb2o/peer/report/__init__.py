"""Reports on a node's rounds: page, figures, live table and records."""
