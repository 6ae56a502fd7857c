"""Views of a node's rounds: the page, its figures, the live table, and the records that these read."""
