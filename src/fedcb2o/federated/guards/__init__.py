"""Checks of received models: those of every agent (`acceptance`), and optional ones (`checks`)."""
