"""The package `ray_backend`."""
