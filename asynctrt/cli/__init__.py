"""The command ``asynctrt``."""
